"""From predictions to one plain sentence, and to the rule that it follows."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparse_collectives.advise.accuracy import in_words, known
from sparse_collectives.advise.factory import TINY
from sparse_collectives.advise.situation import Situation, Steps
from sparse_collectives.prediction.cost import Prediction

WORTHWHILE = 1.1
"""Less speed-up than this is not worth a change of how a model learns, and within what predictions miss."""
AS_FAST = 1.05
"""Of steps that are as fast as the fastest, within this factor, the one that sends most of the gradient is taken."""


class Recommendation(NamedTuple):
    """What to use, "dense" in float32 for nothing.

    speedup: of a step over dense. rule: "fastest", "as fast" (see `AS_FAST`) or "not worthwhile" (see `WORTHWHILE`).
    reason: the rule in words. runner_up: the fastest of the others, None where nothing else was predicted. text: all
    of it, with what to do.
    """

    algorithm: str
    options: dict[str, Any]
    density: float
    wire: str
    speedup: float
    rule: str
    reason: str
    runner_up: dict[str, Any] | None
    text: str


def dense_step(steps: Steps) -> float:
    """Seconds of a step with whole gradients in float32, what everything is compared with."""
    return next(step for prediction, step in steps if _is_dense(prediction))


def recommend(situation: Situation) -> Recommendation:
    """What to use; of nearly equal ones that which changes least.

    Dense before sparse, more before fewer entries, fp32 before fewer bytes.
    """
    steps = situation.predictions()
    dense, (fastest, best) = dense_step(steps), steps[0]
    worthwhile = dense / best >= WORTHWHILE
    nearly = [pair for pair in steps if (pair[1] <= AS_FAST * best if worthwhile else _is_dense(pair[0]))]
    taken, step = max(nearly, key=lambda pair: (pair[0].density, pair[0].wire == "fp32"))
    other = next((pair for pair in steps if pair[0] is not taken), None)
    rule = "not worthwhile" if not worthwhile else "fastest" if taken is fastest else "as fast"
    reason, share = _reason(rule, taken, other), 1 - situation.compute / dense
    advice = _use(situation, taken, step, dense, share) if worthwhile else _leave_off(share, dense / best)
    return Recommendation(
        taken.algorithm,
        dict(taken.options),
        taken.density,
        taken.wire,
        dense / step,
        rule,
        reason,
        None if other is None else _told(*other),
        "\n".join([advice[0], reason, *advice[1:]]),
    )


def _reason(rule: str, taken: Prediction, other: tuple[Prediction, float] | None) -> str:
    if other is None:
        return "Why: nothing else was predicted."
    name = f"{other[0].name}{_at(other[0])} ({_seconds(other[1])})"
    if rule == "fastest":
        return f"Why: it is the fastest; {name} comes next."
    if rule == "as fast":
        wire = ", and of these the one in fp32" if taken.wire == "fp32" else ""
        return (
            f"Why: {name} is the fastest, but of steps that are as fast within {AS_FAST - 1:.0%} the one that sends "
            f"most of the gradient is taken{wire}."
        )
    return (
        f"Why: a gain below {WORTHWHILE - 1:.0%} is not worth a change of how a model learns; the best of the others "
        f"is {name}."
    )


def _use(situation: Situation, taken: Prediction, step: float, dense: float, share: float) -> list[str]:
    gain = f"a step takes {_seconds(step)} instead of {_seconds(dense)}, {dense / step:.1f} times as fast"
    return [
        f"Use {taken.name}{_at(taken)}: {gain}. The network is {share:.0%} of a dense step.",
        *_how(situation, taken),
    ]


def _leave_off(share: float, most: float) -> list[str]:
    gain = "no algorithm makes it shorter" if most <= 1 else f"the most that any algorithm gains is {most - 1:.0%}"
    return [f"Leave it off: the network is {share:.0%} of your step, and {gain}."]


def _at(taken: Prediction) -> str:
    return f" at density {taken.density:.2g}" if taken.density < 1 else ""


def _how(situation: Situation, taken: Prediction) -> list[str]:
    if taken.density == 1:
        return ["In DDP: ddp.register_comm_hook(None, bf16_compress_hook), from torch's ddp_comm_hooks.default_hooks."]
    options = f", options={dict(taken.options)}" if taken.variant != taken.algorithm else ""
    wire = f', wire="{taken.wire}"' if taken.wire != "fp32" else ""
    density = f"WarmUp({taken.density:.2g}, steps=STEPS, stages=(1.0,))"
    setting = f'density={density}, algorithm="{taken.algorithm}"{options}{wire}'
    learns = in_words(known(situation.optimizer, taken.algorithm, taken.density, taken.wire), situation.optimizer)
    if situation.sends_updates:
        name = {"adam": "Adam", "adamw": "AdamW"}[situation.optimizer]
        inner = f"torch.optim.{name}(...), model.named_parameters()"
        how = (
            f'Without DDP: optimizer = DistributedOptimizer({inner}, {setting}, sends="updates", dense_below={TINY}), '
        )
        how += "and forward and backward in `with optimizer.ahead():`."
    else:
        how = (
            f"In DDP: ddp.register_comm_hook(SparseHookState({setting}, momentum=0.9), sparse_hook), and no momentum "
            "in the optimizer."
        )
    return [how, "STEPS: the first tenth of yours, in which all is sent.", learns]


def _is_dense(prediction: Prediction) -> bool:
    return prediction.name == "dense"


def _told(p: Prediction, step: float) -> dict[str, Any]:
    return {
        "algorithm": p.algorithm,
        "options": dict(p.options),
        "density": p.density,
        "wire": p.wire,
        "step_seconds": step,
    }


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
