"""Position of a rank in its block of τ steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from local_sgd.settings import whole

Every: TypeAlias = int | Callable[[int], int]
"""τ, or a function that gives it from the number of steps before the block."""

_HINT = " of steps, or a function from the number of steps so far to one"


class Block:
    """Counts steps; the first block has τ steps like every other.

    steps: in all blocks; done: in this one; weight: the sum of the weights of its steps; boundaries: exchanges so far.
    """

    def __init__(self, every: Every) -> None:
        self.every = every
        self.steps = self.done = self.boundaries = 0
        self.weight = 0.0
        self._length = 0

    @property
    def every(self) -> Every:
        """τ; a new value counts from the next block on."""
        return self._every

    @every.setter
    def every(self, every: Every) -> None:
        self._every = every if callable(every) else whole("sync_every", every, _HINT)

    @property
    def length(self) -> int:
        """τ of this block; 1 before the first step where τ is a function."""
        return self._length or (1 if callable(self._every) else self._every)

    def count(self, weight: float) -> bool:
        """Counts one step; returns whether it was the block's last."""
        if self.done == 0:
            self._length = self._next_length()
        self.steps += 1
        self.done += 1
        self.weight += weight
        return self.done >= self._length

    def end(self) -> None:
        """Ends the block; the next step begins another."""
        self.done, self.weight = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Counters, as plain numbers."""
        counts = {"steps": self.steps, "done": self.done, "length": self._length, "boundaries": self.boundaries}
        return {**counts, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters."""
        self.steps, self.done, self._length = state["steps"], state["done"], state["length"]
        self.weight, self.boundaries = state["weight"], state["boundaries"]

    def _next_length(self) -> int:
        if not callable(self._every):
            return self._every
        return whole(f"sync_every({self.steps})", self._every(self.steps), _HINT.split(",")[0])
