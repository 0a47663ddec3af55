"""Densities: the share of elements to send; exact top-k at a given one; and one that changes with the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

from torch import Tensor

from sparse_compress.arguments import check_dense, integer, share_of
from sparse_compress.selection import ANY, Plan, Selection, topk
from sparse_compress.vector import SparseVector

SHARE = "the fraction of elements to send"
FEW = 0.01
STAGES = (0.25, 0.0625, 0.015625, 0.004)


class Density:
    """Density with k = max(1, round(density · n)), 0 only for an empty tensor.

    ``density``: 0 < density ≤ 1, else ValueError; TypeError for anything but a number. It may be set anew.
    """

    finds_nonfinite = True

    def __init__(self, density: float = 0.01) -> None:
        self.density = density

    @property
    def density(self) -> float:
        """Fraction of elements to send."""
        return self._density

    @density.setter
    def density(self, density: float) -> None:
        self._density = share_of(density, "density", expected=SHARE)

    def entries(self, numel: int) -> int:
        """Bound k on the entries that are sent of ``numel`` elements, alike on every rank."""
        return min(numel, max(1, round(self._density * numel)))

    def __repr__(self) -> str:
        given = [name for name in signature(type(self)).parameters if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in given)})"


class TopK(Density, Selection):
    """Selects the k = max(1, round(density · n)) largest of n elements by magnitude, exactly (see ``topk``).

    Stateless and deterministic; always k entries.

    Args:
        density: The share of elements to send, 0 < density ≤ 1.

    Raises:
        TypeError: density is no number.
        ValueError: density is out of range.
    """

    def __call__(self, tensor: Tensor) -> SparseVector:
        check_dense(tensor, "tensor")
        return topk(tensor, self.entries(tensor.numel()))

    def plan(self, numel: int) -> Plan:
        """Plan of the one block that the whole tensor is; error feedback selects in the sweep that accumulates."""
        return [((0, numel), self.entries(numel))], ANY


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

    @classmethod
    def recommended(cls, density: float, steps: int) -> WarmUp:
        """Warm-up of a training of so many steps: dense in the first tenth; below 1 %, the paper's for the first fifth.

        Measured by `python -m bench convergence`: below 1 % most models learn better so than by dense steps, and it
        sends less.

        Args:
            density: Final share.
            steps: Number of steps of the whole training.
        """
        return cls(density, steps // 5) if density < FEW else cls(density, steps // 10, stages=(1.0,))

    def __call__(self, step: int) -> float:
        """Density of a step.

        Args:
            step: Number of the step, from 0 on.
        """
        if step >= self.steps:
            return self.density
        return self.stages[step * len(self.stages) // self.steps]
