"""Recommendation in one plain sentence, and the rule that it follows."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparse_collectives.advise import warm_up
from sparse_collectives.advise.accuracy import MOST_BEHIND, in_words, on_ranks, within_a_point
from sparse_collectives.advise.factory import TINY
from sparse_collectives.advise.situation import Situation, Step, Steps
from sparse_collectives.prediction.cost import Prediction

BETAS = "..., betas=(0.5, 0.999)"
WORTHWHILE = 1.1
"""Less speed-up than this is not worth a change of how a model learns, and within what predictions miss."""
AS_FAST = 1.05
"""Of steps that are as fast as the fastest, within this factor, the one that sends most of the gradient is taken."""
WELL, UNKNOWN, BADLY = range(3)
"""How an exchange is known to learn, best first."""


class Recommendation(NamedTuple):
    """Recommended algorithm, density and wire; "dense" in float32 means no compression.

    speedup: over dense, of the whole training, warm-up included; speedup_after_warm_up: of a step after it. rule:
    "fastest", "as fast" (see `AS_FAST`), "accuracy" (faster ones lose too much, or were not measured) or "not
    worthwhile" (see `WORTHWHILE`). reason: the rule in words. runner_up: the fastest of the others, None if nothing
    else was predicted. text: the full advice, with what to do.
    """

    algorithm: str
    options: dict[str, Any]
    density: float
    wire: str
    speedup: float
    speedup_after_warm_up: float
    rule: str
    reason: str
    runner_up: dict[str, Any] | None
    text: str


def dense_step(steps: Steps) -> float:
    """Seconds of a step with whole gradients in float32, what everything is compared with."""
    return next(step.mean for step in steps if _is_dense(step.prediction))


def recommend(situation: Situation) -> Recommendation:
    """Recommends the fastest exchange, or the one that changes least among nearly equal ones.

    Considers only those that learn well enough, see `_eligible`. Prefers dense to sparse, more entries to fewer, and
    fp32 to fewer bytes.
    """
    steps = situation.predictions()
    dense, eligible = dense_step(steps), _eligible(situation, steps)
    best = eligible[0].mean
    worthwhile = dense / best >= WORTHWHILE
    nearly = [s for s in eligible if (s.mean <= AS_FAST * best if worthwhile else _is_dense(s.prediction))]
    taken = max(nearly, key=lambda s: (s.prediction.density, s.prediction.wire == "fp32"))
    other = next((s for s in steps if s is not taken), None)
    passed = [s for s in steps if s.mean < best and s not in eligible]
    rule = "fastest" if taken is eligible[0] else "as fast"
    rule = "not worthwhile" if not worthwhile else "accuracy" if passed else rule
    reason = " ".join([_reason(rule, taken.prediction, other), *_passed_over(situation, passed)])
    share = 1 - situation.compute / dense
    advice = _use(situation, taken, dense, share) if worthwhile else _leave_off(share, dense / best)
    p = taken.prediction
    return Recommendation(
        p.algorithm,
        dict(p.options),
        p.density,
        p.wire,
        dense / taken.mean,
        dense / taken.seconds,
        rule,
        reason,
        None if other is None else _told(other),
        "\n".join([advice[0], reason, *advice[1:]]),
    )


def _eligible(situation: Situation, steps: Steps) -> Steps:
    """Whole gradients, and what is known to learn within a point of them.

    Where none of these is worthwhile also what nobody measured. Of densities that the user chose one is taken first
    among those that are known to learn well, then the unknown, then whatever is known to lose.
    """
    dense = dense_step(steps)
    for level in (WELL, UNKNOWN, BADLY) if situation.chosen else (WELL, UNKNOWN):
        found = [s for s in steps if _learns(situation, s.prediction) <= level]
        asked = [s for s in found if s.prediction.density < 1] if situation.chosen else found
        if asked and dense / asked[0].mean >= WORTHWHILE:
            return found
    return [s for s in steps if _learns(situation, s.prediction) == WELL]


def _learns(situation: Situation, p: Prediction) -> int:
    if p.density == 1:
        return WELL
    found = situation.known(p)
    return UNKNOWN if found is None else WELL if within_a_point(found) else BADLY


def _passed_over(situation: Situation, passed: Steps) -> list[str]:
    """Reasons for passing over faster exchanges, one for the fastest of each kind."""
    said = []
    for level in (BADLY, UNKNOWN):
        p, _, mean = next((s for s in passed if _learns(situation, s.prediction) == level), (None, 0.0, 0.0))
        if p is None:
            continue
        name = f"{p.name}{_at(p)} ({_seconds(mean)})"
        found = situation.known(p)
        why = (
            "how it learns was not measured"
            if found is None
            else f"it ended up to {found.most:.1f} points behind dense {on_ranks(found)}"
        )
        said.append(f"Faster, but passed over: {name}; with {situation.optimizer} {why}.")
    return said


def _reason(rule: str, taken: Prediction, other: Step | None) -> str:
    if other is None:
        return "Why: nothing else was predicted."
    name = f"{other.prediction.name}{_at(other.prediction)} ({_seconds(other.mean)})"
    if rule == "fastest":
        return f"Why: it is the fastest; {name} comes next."
    if rule == "accuracy":
        return f"Why: of what is known to learn within {MOST_BEHIND:g} point of dense it is the fastest, or as fast."
    if rule == "as fast":
        wire = ", and of these the one in fp32" if taken.wire == "fp32" else ""
        return (
            f"Why: {name} is the fastest, but of steps that are as fast within {AS_FAST - 1:.0%} the one that sends "
            f"most of the gradient is taken{wire}."
        )
    return (
        f"Why: a gain below {WORTHWHILE - 1:.0%} is not worth a change of how a model learns; the fastest of the "
        f"others is {name}."
    )


def _use(situation: Situation, taken: Step, dense: float, share: float) -> list[str]:
    p, later, mean = taken
    before = f"Use {p.name}{_at(p)}: "
    if p.density == 1:
        gain = f"a step takes {_seconds(mean)} instead of {_seconds(dense)}, {dense / mean:.1f} times as fast"
    else:
        gain = (
            f"over a whole training, the warm-up included, a step takes {_seconds(mean)} instead of {_seconds(dense)}, "
            f"{dense / mean:.1f} times as fast; after the warm-up {_seconds(later)}, {dense / later:.1f} times"
        )
    return [f"{before}{gain}. The network is {share:.0%} of a dense step.", *_how(situation, p)]


def _leave_off(share: float, most: float) -> list[str]:
    gain = (
        "none that learns well enough makes it shorter" if most <= 1 else f"the most that any gains is {most - 1:.0%}"
    )
    return [f"Leave it off: the network is {share:.0%} of your step, and {gain}."]


def _at(taken: Prediction) -> str:
    return f" at density {taken.density:.2g}" if taken.density < 1 else ""


def _how(situation: Situation, taken: Prediction) -> list[str]:
    if taken.density == 1:
        return ["In DDP: ddp.register_comm_hook(None, bf16_compress_hook), from torch's ddp_comm_hooks.default_hooks."]
    options = f", options={dict(taken.options)}" if taken.variant != taken.algorithm else ""
    wire = f', wire="{taken.wire}"' if taken.wire != "fp32" else ""
    density, steps = warm_up.in_words(taken.density)
    setting = f'density={density}, algorithm="{taken.algorithm}"{options}{wire}'
    ranks = situation.ranks
    found = situation.known(taken)
    learns = in_words(found, situation.optimizer, ranks)
    chosen = ["The density is yours; it was not weighed against others."] if situation.chosen else []
    if situation.sends_updates:
        made = {"sgd": "SGD(..., momentum=0.9)", "adam": f"Adam({BETAS})", "adamw": f"AdamW({BETAS})"}
        inner = f"torch.optim.{made[situation.optimizer]}, model.named_parameters()"
        how = f"Without DDP: optimizer = UpdateOptimizer({inner}, {setting}, dense_below={TINY}), "
        how += "and forward and backward in `with optimizer.ahead():`."
    else:
        how = (
            f"In DDP: ddp.register_comm_hook(SparseHookState({setting}, momentum=0.9), sparse_hook), and no momentum "
            "in the optimizer."
        )
    return [how, steps, *chosen, learns]


def _is_dense(prediction: Prediction) -> bool:
    return prediction.name == "dense"


def _told(step: Step) -> dict[str, Any]:
    p = step.prediction
    return {
        "algorithm": p.algorithm,
        "options": dict(p.options),
        "density": p.density,
        "wire": p.wire,
        "step_seconds": step.seconds,
        "mean_step_seconds": step.mean,
    }


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
