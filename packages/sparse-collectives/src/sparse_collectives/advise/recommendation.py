"""From predictions to one plain sentence."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparse_collectives.advise.situation import Situation
from sparse_collectives.cost import Prediction

WORTHWHILE = 1.1
"""Less speed-up than this is not worth a change of how a model learns, and within what predictions miss."""
AS_FAST = 1.05
"""Of steps that are as fast as the fastest, within this factor, the one that sends most of the gradient is taken."""


class Recommendation(NamedTuple):
    """What to use, "dense" in float32 for nothing. speedup: of a step over dense. text: why."""

    algorithm: str
    options: dict[str, Any]
    density: float
    wire: str
    speedup: float
    text: str


def dense_step(steps: list[tuple[Prediction, float]]) -> float:
    """Seconds of a step with whole gradients in float32, what everything is compared with."""
    return next(step for prediction, step in steps if prediction.name == "dense")


def recommend(situation: Situation) -> Recommendation:
    """What to use. Of nearly equal ones that which changes least: dense before sparse, more before fewer entries, fp32
    before fewer bytes.
    """
    steps = situation.predictions()
    dense, best = dense_step(steps), steps[0][1]
    nearly = [pair for pair in steps if pair[1] <= AS_FAST * best]
    taken, step = max(nearly, key=lambda pair: (pair[0].density, pair[0].wire == "fp32"))
    share = 1 - situation.compute / dense
    if dense / best < WORTHWHILE:
        return Recommendation("dense", {}, 1.0, "fp32", 1.0, _leave_off(share, dense / best))
    gain = f"a step takes {_seconds(step)} instead of {_seconds(dense)}, {dense / step:.1f} times as fast"
    text = f"Use {taken.name}{_at(taken)}: {gain}. The network is {share:.0%} of a dense step.\n{_how(taken)}"
    options = dict(taken.options)
    return Recommendation(taken.algorithm, options, taken.density, taken.wire, dense / step, text)


def _leave_off(share: float, most: float) -> str:
    gain = "no algorithm makes it shorter" if most <= 1 else f"the most that any algorithm gains is {most - 1:.0%}"
    return f"Leave it off: the network is {share:.0%} of your step, and {gain}."


def _at(taken: Prediction) -> str:
    return f" at density {taken.density:.2g}" if taken.density < 1 else ""


def _how(taken: Prediction) -> str:
    if taken.density == 1:
        return "In DDP: ddp.register_comm_hook(None, bf16_compress_hook), from torch's ddp_comm_hooks.default_hooks."
    options = f", options={dict(taken.options)}" if taken.variant != taken.algorithm else ""
    wire = f', wire="{taken.wire}"' if taken.wire != "fp32" else ""
    setting = (
        f'SparseHookState(density={taken.density:.2g}, algorithm="{taken.algorithm}"{options}{wire}, momentum=0.9)'
    )
    return (
        f"In DDP: ddp.register_comm_hook({setting}, sparse_hook), and no momentum in the optimizer.\n"
        "Time is not accuracy: compare the first epochs with dense ones."
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
