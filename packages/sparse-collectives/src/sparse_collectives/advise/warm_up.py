"""The warm-up that is advised, with which the record of accuracy was made."""

from __future__ import annotations

from collections import Counter

from sparse_compress import WarmUp

FEW = 0.01
"""Below it DGC's own warm-up is advised: at 0.1 % models learn better by it than by dense steps, and it sends less."""
STEPS = 1000


def advised(density: float, steps: int) -> WarmUp:
    """Recommended warm-up: dense for the first tenth of the steps; below 1 %, DGC's stages for the first fifth.

    Measured by `python -m bench convergence`, where "gtopk, dense tenth" is the first at 0.1 % too.
    """
    return WarmUp(density, steps // 5) if density < FEW else WarmUp(density, steps // 10, stages=(1.0,))


def in_words(density: float) -> tuple[str, str]:
    """The warm-up as Python text with STEPS as a placeholder, and the meaning of STEPS."""
    given = f"{density:.2g}, steps=STEPS"
    if density < FEW:
        return f"WarmUp({given})", "STEPS: the first fifth of yours, in which ever less is sent."
    return f"WarmUp({given}, stages=(1.0,))", "STEPS: the first tenth of yours, in which all is sent."


def shares(density: float) -> dict[float, float]:
    """{density: share of the training's steps that use it}."""
    warm_up = advised(density, STEPS)
    return {sent: count / STEPS for sent, count in Counter(map(warm_up, range(STEPS))).items()}
