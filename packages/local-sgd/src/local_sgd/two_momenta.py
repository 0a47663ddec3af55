"""Momentum inside, in the steps of a block, and momentum outside, over blocks: where the two swing up together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 11.0
"""Of `carried` times the gain outside. Measured with SGD of momentum 0.9 on a CNN and a transformer, τ = 4: SlowMo of
α = 1 learns as `LocalSGD` does at 9 (β = 0.3), loses up to 20 points at 13 (β = 0.5) and fails at 22 (β = 0.7). On
quadratics the stable rates are a tenth of SGD's and less from about 12 on.
"""

SAID = (
    "two momenta multiply each other: {what}'s multiplies a steady change by {gain:.3g}, and that of the SGD inside, "
    "{inner}, goes on from block to block of {steps} steps. Learning rates that are stable with either alone can "
    "diverge. Lower the outer rate to 1 - the outer momentum, or give inner_state='reset', a larger sync_every, or "
    "less momentum."
)


def carried(momentum: float, steps: int) -> float:
    """How far a unit gradient of a block's beginning has still to move the rank when so many steps have ended it."""
    return momentum**steps / (1 - momentum)


def warn_of_two_momenta(what: str, gain: float, groups: Iterable[Mapping[str, Any]], steps: int) -> None:
    """Warns where the momentum of SGD in one of its parameter groups multiplies with that of blocks of so many steps.

    AdamW's does not: its steps are of one length whatever its momentum.

    gain: the factor by which the algorithm's momentum multiplies a steady change; 0 if it has none.
    steps: 0 where none was taken.
    """
    inner = max((sgd_momentum(group) for group in groups), default=0.0)
    if steps and gain * carried(inner, steps) > MOST:
        warnings.warn(SAID.format(what=what, gain=gain, inner=inner, steps=steps), stacklevel=6)


def sgd_momentum(group: Mapping[str, Any]) -> float:
    """Momentum of a parameter group of SGD, known by its dampening; 0 for other optimizers, and outside of (0, 1)."""
    momentum = float(group.get("momentum", 0.0)) if group.get("dampening") == 0 else 0.0
    return momentum if 0 < momentum < 1 else 0.0
