"""Recommendation in one plain sentence, and the rule that it follows."""

from typing import NamedTuple

from sparse_collectives import ALGORITHMS, Prediction

from thinwire.advice.accuracy import MOST_BEHIND, in_words
from thinwire.advice.situation import Situation, Step
from thinwire.advice.ways import BY_NAME, MADE, WHOLE, bucket_of_all

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(...)",
    "adam": "torch.optim.Adam(...)",
    "adamw": "torch.optim.AdamW(...)",
    "muon": "replicas.MuonAdamW(model, ...)",
}
"""Optimizers of the user, as they are written."""
OVERLAPS = (
    "which sends during backward: call optimizer.synchronize() before p.grad is clipped, and accumulate in "
    "optimizer.no_sync()."
)
WORTHWHILE = 1.1
"""Less speed-up than this is not worth a change of how a model learns, and within what predictions miss."""
AS_FAST = 1.05
"""Factor within which steps are as fast as the fastest; of these, the one that sends most of the gradient is taken.

For torch's own it is `WORTHWHILE`: nothing of ours is to be installed for less.
"""
WELL, UNKNOWN, BADLY = range(3)
"""How an exchange is known to learn, best first."""
OWN = "whole gradients and selections at a density of yours"
AMONG = {
    None: f"what is known to learn within {MOST_BEHIND:g} point of dense",
    WELL: f"{OWN} that are known to learn within {MOST_BEHIND:g} point of dense",
    UNKNOWN: f"{OWN} that are not known to learn worse",
    BADLY: OWN,
}
"""What is considered, by how selections at a density of the user's may learn; None: it is not kept to."""


class Recommendation(NamedTuple):
    """Recommended step; that of "dense" in float32 means no compression.

    rule: "fastest", "as fast" (see `AS_FAST`), "accuracy" (faster ones lose too much, were not measured, or have not
    the density that was asked for) or "not worthwhile" (see `WORTHWHILE`). reason: the rule in words. runner_up: the
    fastest of the others, None if nothing else was predicted. text: the full advice, with what to do.
    """

    step: Step
    rule: str
    reason: str
    runner_up: Step | None
    text: str


def dense_step(steps: list[Step]) -> float:
    """Seconds of a step with whole gradients in float32, what everything is compared with."""
    return next(step.mean for step in steps if step.prediction.name == "dense")


def recommend(situation: Situation) -> Recommendation:
    """Recommends what is as good as dense soonest, or the one that changes least among nearly equal ones.

    Considers only those that learn well enough, see `_eligible`. Prefers dense to sparse, more entries to fewer, and
    fp32 to fewer bytes.
    """
    steps = situation.predictions()
    dense, (eligible, kept) = dense_step(steps), _eligible(situation, steps)
    best = eligible[0].until
    worthwhile = dense / best >= WORTHWHILE
    nearly = [s for s in eligible if (_as_fast(s, eligible[0], dense) if worthwhile else s.prediction.name == "dense")]
    taken = max(nearly, key=lambda s: (_share(situation, s.prediction), s.prediction.wire == "fp32"))
    p, other = taken.prediction, next((s for s in steps if s is not taken), None)
    passed = [s for s in steps if s.mean < eligible[0].mean and s not in eligible]
    faster = "accuracy" if passed else "fastest" if taken is eligible[0] else "as fast"
    rule = faster if worthwhile else "not worthwhile"
    set_aside = _set_aside(situation, [*eligible, *steps], taken, dense) if situation.chosen else []
    nearest = other if worthwhile else next((s for s in eligible if s is not taken), None)
    reason = " ".join([_reason(rule, p, nearest, kept), *set_aside, *_passed_over(situation, passed)])
    advice, *lines = _use(situation, taken, dense) if worthwhile else _leave_off(situation, dense, best)
    return Recommendation(taken, rule, reason, other, "\n".join([advice, reason, *lines]))


def _as_fast(step: Step, best: Step, dense: float) -> bool:
    instead = _is_torchs(step.prediction) and not _is_torchs(best.prediction) and dense >= WORTHWHILE * step.until
    return step.until <= best.until * (WORTHWHILE if instead else AS_FAST)


def _eligible(situation: Situation, steps: list[Step]) -> tuple[list[Step], int | None]:
    """Whole gradients, and what is known to learn within a point of them. With its key of `AMONG`.

    Of densities that the user chose one is taken first among those that are known to learn well, then the unknown, then
    whatever is known to lose; none but these beside whole gradients.
    """
    dense, learns = dense_step(steps), {id(s): _learns(situation, s.prediction) for s in steps}
    if situation.chosen:
        own = [s for s in steps if _selects(s.prediction)]
        whole = [s for s in steps if s.prediction.algorithm in WHOLE and not _lacks_ddp(situation, s.prediction)]
        for level in (WELL, UNKNOWN, BADLY):
            found = [s for s in own if learns[id(s)] <= level]
            if found and dense / found[0].until >= WORTHWHILE:
                return sorted([*found, *whole], key=lambda s: s.until), level
    return [s for s in steps if learns[id(s)] == WELL and not _lacks_ddp(situation, s.prediction)], None


def _lacks_ddp(situation: Situation, p: Prediction) -> bool:
    return situation.plain and _is_torchs(p)


def _is_torchs(p: Prediction) -> bool:
    return p.variant in BY_NAME and BY_NAME[p.variant].ddp_only


def _selects(p: Prediction) -> bool:
    return p.algorithm in ALGORITHMS and ALGORITHMS[p.algorithm].selects


def _share(situation: Situation, p: Prediction) -> float:
    """Share of the gradient that is sent: of its elements, or of the bytes that a step of dense gradients has."""
    return p.density if p.algorithm in (*ALGORITHMS, *WHOLE) else p.nbytes / max(1, 8 * situation.numel)


def _learns(situation: Situation, p: Prediction) -> int:
    if p.algorithm in WHOLE:
        return WELL
    found = situation.known(p)
    if found is None or (found.most <= MOST_BEHIND and found.few):
        return UNKNOWN
    return WELL if found.most <= MOST_BEHIND and found.pace else BADLY


def _set_aside(situation: Situation, steps: list[Step], taken: Step, dense: float) -> list[str]:
    """Reason why none of the user's densities was taken; steps: the first selection is spoken of."""
    if _selects(taken.prediction):
        return []
    own = next((s for s in steps if _selects(s.prediction)), None)
    if own is None:
        return ["Your density was set aside: of so few elements it selects all."]
    takes, advised = (f"{step.until / dense:.2f}" for step in (own, taken))
    good = "until it is as good" if _learns(situation, own.prediction) == WELL else "if it learns as well"
    more = ", which counts as just as fast, and sends more" if own.until <= taken.until else ""
    until = f"takes {takes} of dense's time {good}, what is advised {advised}{more}"
    return [f"Your density was set aside: {_named(own)} {until}."]


def _passed_over(situation: Situation, passed: list[Step]) -> list[str]:
    """Reasons for passing over faster exchanges, one for the fastest of each kind."""
    fastest = {_learns(situation, step.prediction): step for step in reversed(passed)}
    said = []
    if hook := next(
        (s for s in passed if _lacks_ddp(situation, s.prediction) and _learns(situation, s.prediction) == WELL), None
    ):
        said.append(f"Faster, but passed over: {_named(hook)}; it is a hook of DDP, and the model is not in DDP.")
    for step in (fastest[level] for level in (BADLY, UNKNOWN) if level in fastest):
        found, why = situation.known(step.prediction), "how it learns was not measured"
        if found is not None and found.most <= MOST_BEHIND and found.few:
            seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
            why = f"how it learns was measured with {found.tasks[0]} alone ({seeds})"
        elif found is not None:
            ranks = " and ".join(map(str, sorted(set(found.ranks))))
            why = f"it ended up to {found.most:.1f} points behind dense on {ranks} ranks"
        said.append(f"Faster, but passed over: {_named(step)}; with {situation.optimizer} {why}.")
    return said


def _reason(rule: str, taken: Prediction, other: Step | None, kept: int | None) -> str:
    if other is None:
        return "Why: nothing else that learns well enough was predicted."
    within, wire = AS_FAST, ", and of these the one in fp32" if taken.wire == "fp32" else ""
    if _is_torchs(taken):
        within, wire = WORTHWHILE, ", and of these torch's own"
    fastest = "the fastest" if kept in (UNKNOWN, BADLY) else "the fastest until as good as dense"
    why = {
        "fastest": f"it is {fastest}; {_named(other)} comes next.",
        "accuracy": f"of {AMONG[kept]} it is the fastest, or as fast.",
        "as fast": f"{_named(other)} is {fastest}, but of steps that are as fast within "
        f"{within - 1:.0%} the one that sends most of the gradient is taken{wire}.",
        "not worthwhile": f"a gain below {WORTHWHILE - 1:.0%} is not worth a change of how a model learns; of the "
        f"others that learn well enough the fastest is {_named(other)}.",
    }
    return f"Why: {why[rule]}"


def _leave_off(situation: Situation, dense: float, best: float) -> list[str]:
    gain = f"of those that learn well enough none gains more than {dense / best - 1:.0%}"
    gain = gain if dense > best else "none that learns well enough makes it shorter"
    return [f"Leave it off: {_spent(situation, dense)} of your step, and {gain}."]


def _spent(situation: Situation, dense: float) -> str:
    what = "late ranks and the network are" if situation.stragglers else "the network is"
    return f"{what} {1 - situation.compute / dense:.0%}"


def _use(situation: Situation, taken: Step, dense: float) -> list[str]:
    """The gain, then what to write."""
    p, later, mean, _ = taken
    network = f"{_spent(situation, dense).capitalize()} of a dense step."
    gain = f"a step takes {_seconds(mean)} instead of {_seconds(dense)}, {dense / mean:.1f} times as fast"
    found = situation.known(p)
    steps = [_soon(found.pace, taken, dense)] if found and found.pace and found.most <= MOST_BEHIND else []
    if p.algorithm in WHOLE:
        return [f"Use {p.name}: {gain}. {network}", *_other_lines(situation, p)]
    learns = in_words(situation.known(p), situation.optimizer, situation.ranks)
    if p.variant in BY_NAME:
        use = f"Use {p.variant}: over a whole training {gain}. {network}"
        return [use, *steps, *_other_lines(situation, p), learns]
    training = f"over a whole training, the warm-up included, {gain}"
    after = f"after the warm-up {_seconds(later)}, {dense / later:.1f} times"
    chosen = ["The density is yours; it was not weighed against others."] if situation.chosen else []
    use = f"Use {p.name} at density {p.density}: {training}; {after}. {network}"
    return [use, *steps, *_lines(situation, p), *chosen, learns]


def _soon(pace: float, step: Step, dense: float) -> str:
    """Sentence on the time until it is as good as dense: by its steps until then, of which the warm-up is a part."""
    more = "no more steps" if pace == 1 else f"{pace:.2f} times as many steps"
    return (
        f"Small trainings were as good as dense ones at the end after {more}: until then, the warm-up included, it "
        f"takes {step.until / dense:.2f} of dense's time."
    )


def _lines(situation: Situation, p: Prediction) -> list[str]:
    """Code of a sparse exchange."""
    options = f", options={dict(p.options)}" if p.variant != p.algorithm else ""
    wire = f', wire="{p.wire}"' if p.wire != "fp32" else ""
    setting, steps = f'algorithm="{p.algorithm}"{options}{wire}', "STEPS: of your whole training, for the warm-up."
    if not situation.sends_updates:
        hook = f"SparseHookState.for_model(ddp, optimizer, steps=STEPS, density={p.density}, {setting})"
        return [f"In DDP: state = {hook}, which takes the momentum over from the optimizer.", steps]
    inner = OPTIMIZERS[situation.optimizer].replace("SGD(...)", "SGD(..., momentum=0.9)")
    made = f"UpdateOptimizer.for_model({inner}, model, steps=STEPS, density={p.density}, {setting})"
    return [f"Without DDP: optimizer = {made}", steps]


def _other_lines(situation: Situation, p: Prediction) -> list[str]:
    """Code of a way that selects nothing, and what it asks of the training."""
    way = MADE[p.name]
    lines = [f"In DDP: {way.hook}"] if way.hook else []
    if not way.ddp_only:
        code = way.code.replace("OPTIMIZER", OPTIMIZERS[situation.optimizer])
        if situation.overlaps(way):
            code = f"{code[:-1]}, overlap=True), {OVERLAPS}"
        lines.append(f"Without DDP: optimizer = {code}")
    if way.dense_share:
        lines.append(f"STEPS: the first {way.dense_share:.0%} of yours, in which all is sent.")
    if way.every > 1 and not way.ddp_only:
        lines.append("Call optimizer.average() after every optimizer.step(), and optimizer.finish() at the end.")
    if way.note:
        lines.append(way.note.replace("MEGABYTES", str(bucket_of_all(4 * situation.numel))))
    if way.rate != 1 and situation.optimizer != "muon":
        lines.append(f"Take {way.rate:g} of your learning rate: blocks of steps go further than their mean.")
    return lines


def _named(step: Step) -> str:
    """An exchange with its seconds: "gtopk at density 0.01 (514 ms)"."""
    p = step.prediction
    return f"{p.name}{f' at density {p.density}' if p.density < 1 else ''} ({_seconds(step.mean)})"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
