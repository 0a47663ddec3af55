"""A density that changes with the steps: a schedule that every rank follows by the same count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparse_compress import Compressor

Schedule = Callable[[int], float]
"""From the number of a step, from 0 on, to the share of elements to send in it."""


class DensityByStep:
    """Sets a compressor's density before each step; without a schedule it leaves it alone.

    Nothing is kept: a density depends on the step's number alone, so a run that is resumed goes on with it.
    """

    def __init__(self, compressor: Compressor, density: Any) -> None:
        self._compressor: Any = compressor
        self._schedule: Schedule | None = density if callable(density) else None
        self.set(0)  # what the schedule gives is checked at once, and is known before the first step

    @property
    def last(self) -> float:
        """What it ends at, where that can be told: a compressor's own density, or what a schedule calls its; else 1."""
        return float(getattr(self._schedule or self._compressor, "density", 1.0))

    def set(self, step: int) -> None:
        """Before that step's first selection. Raises what the compressor raises for what is no density."""
        if self._schedule is not None:
            self._compressor.density = self._schedule(step)

    def __repr__(self) -> str:
        return "" if self._schedule is None else f"density={self._schedule!r}"
