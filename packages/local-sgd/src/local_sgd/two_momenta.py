"""Momentum inside, in the steps of a block, and outside, over blocks: a warning where they amplify each other."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 11.0
"""Largest `carried` times outer gain without a warning. Measured with SGD of momentum 0.9 on a CNN and a transformer,
τ = 4: SlowMo of α = 1 learns as `LocalSGD` does at 9 (β = 0.3), loses up to 20 points at 13 (β = 0.5) and fails at 22
(β = 0.7). On quadratics the stable rates are a tenth of SGD's and less from about 12 on.
"""

SAID = (
    "two momenta multiply each other: {what}'s multiplies a steady change by {gain:.3g}, and that of the SGD inside, "
    "{inner}, goes on from block to block of {steps} steps. Learning rates that are stable with either alone can "
    "diverge. Lower the outer rate to 1 - the outer momentum, or give inner_state='reset', a larger sync_every, or "
    "less momentum."
)


def carried(momentum: float, steps: int) -> float:
    """Distance that a unit gradient of a block's beginning still moves the rank after the block's `steps` steps."""
    return momentum**steps / (1 - momentum)


def warn_of_two_momenta(what: str, gain: float, groups: Iterable[Mapping[str, Any]], steps: int) -> None:
    """Warns where SGD's momentum in one of its parameter groups multiplies too far with momentum over blocks.

    AdamW's momentum does not count: its steps have one length whatever the momentum.

    gain: the factor by which the algorithm's momentum multiplies a steady change; 0 without momentum.
    steps: length of a block; 0 where none was taken.
    """
    inner = max((sgd_momentum(group) for group in groups), default=0.0)
    if steps and gain * carried(inner, steps) > MOST:
        warnings.warn(SAID.format(what=what, gain=gain, inner=inner, steps=steps), stacklevel=6)


def sgd_momentum(group: Mapping[str, Any]) -> float:
    """Momentum of a parameter group of SGD, known by its dampening; 0 for other optimizers, and outside (0, 1)."""
    momentum = float(group.get("momentum", 0.0)) if group.get("dampening") == 0 else 0.0
    return momentum if 0 < momentum < 1 else 0.0
