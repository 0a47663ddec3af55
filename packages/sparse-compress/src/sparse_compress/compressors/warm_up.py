"""Densities that change with the steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_compress.arguments import integer, share_of
from sparse_compress.compressors.compressor import SHARE

STAGES = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True)
class WarmUp:
    """Share of elements to send in a step (from 0 on): large in the first ``steps``, then ``density``.

        DistributedOptimizer(..., density=WarmUp(0.001, steps=500))

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, section 3.3. Differs from the paper: steps in place of
    epochs; ``steps`` = 4 · (steps of an epoch) gives the paper's at 0.1 %.

    Args:
        density: Final share, 0 < density ≤ 1.
        steps: Number of steps of the warm-up, ≥ 0.
        stages: Shares to send, each in an equal part of ``steps``, never below ``density``; default: the
            paper's exponential ones, 25 %, 6.25 %, 1.5625 %, 0.4 %, those of them that are above ``density``.
            ``(1.0,)`` sends all of the first ``steps``.

    Raises:
        TypeError: One of them is no number.
        ValueError: ``steps`` is negative, there are no stages, or a density is beyond (0, 1].
    """

    density: float
    steps: int
    stages: Sequence[float] = STAGES

    def __post_init__(self) -> None:
        share_of(self.density, "density", expected=SHARE)
        integer(self.steps, "steps", least=0, expected="how many steps the warm-up takes")
        given = tuple(share_of(stage, f"stage {number}", expected=SHARE) for number, stage in enumerate(self.stages))
        if not given:
            raise ValueError("stages is empty, expected the densities of a warm-up, such as (1.0,)")
        above = tuple(stage for stage in given if stage > self.density)
        object.__setattr__(self, "stages", above or (self.density,))

    def __call__(self, step: int) -> float:
        """Density of a step.

        Args:
            step: Number of the step, from 0 on.
        """
        if step >= self.steps:
            return self.density
        return self.stages[step * len(self.stages) // self.steps]
