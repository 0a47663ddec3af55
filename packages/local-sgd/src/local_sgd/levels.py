"""Two levels: frequent means among a few ranks, such as those of one machine, and the algorithm among all, rarely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from communicators import Communicator, allgather, as_communicator

from local_sgd.averaging import Averaging
from local_sgd.block import Block, Every
from local_sgd.settings import Settings, whole

Levels: TypeAlias = Sequence[tuple[Any, int]]
"""[(this rank's small group, steps between its means), (all ranks, steps between boundaries)]"""


@dataclass(frozen=True)
class Inner:
    """First of two levels. times: its means per boundary among all ranks."""

    group: Any
    every: int
    times: int

    def __repr__(self) -> str:
        """Text that is the same on every rank."""
        return f"{self.every} steps, {self.times} times"


def two_levels(sync_every: Every | Levels, settings: Settings) -> tuple[Inner | None, Every]:
    """Splits `sync_every` into the first level and τ among all ranks; `settings` gets the last level's group as comm.

    Raises:
        TypeError: A number of steps is no whole number.
        ValueError: There are not two levels, or they do not fit each other or `comm`.
    """
    if callable(sync_every) or not isinstance(sync_every, Sequence):
        return None, sync_every
    if len(sync_every) != 2 or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in sync_every):
        raise ValueError(f"sync_every is {sync_every!r}, expected a number or two pairs of a group and a number")
    if settings.get("comm") is not None:
        raise ValueError("comm is given, and a group of all ranks in the last pair of sync_every: leave comm out")
    (group, often), (everybody, seldom) = sync_every
    if group is None:
        raise ValueError("the first pair of sync_every has no group: give this rank's, such as its machine's")
    often, seldom = whole("the first number of sync_every", often), whole("the last number of sync_every", seldom)
    if seldom % often:
        raise ValueError(f"sync_every has {often} and {seldom} steps, expected a multiple of {often} as the last one")
    settings["comm"] = everybody
    return Inner(group, often, seldom // often), seldom


class Near:
    """Small group of this rank: means by weight. met: their number since the last boundary among all ranks."""

    def __init__(self, inner: Inner, everybody: Communicator, what: str, *, native: bool) -> None:
        self.comm, self.times, self.met = as_communicator(inner.group), inner.times, 0
        self.block = Block(inner.every)
        _refuse_gaps(self.comm, everybody)
        self.averaging = Averaging(self.comm, f"{what} in its group", native=native)

    @property
    def is_due(self) -> bool:
        """Whether a boundary among all ranks comes next."""
        return self.met >= self.times

    def begin(self) -> None:
        """Starts counting again after a boundary among all ranks."""
        self.met = 0
        self.block.end()

    def state_dict(self) -> dict[str, Any]:
        """Counters, as plain numbers."""
        return {"met": self.met, "block": self.block.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counters."""
        self.met = state["met"]
        self.block.load_state_dict(state["block"])


def _refuse_gaps(group: Communicator, everybody: Communicator) -> None:
    """Raises ValueError, on all ranks alike, unless every rank is in one group, and its ranks agree on that group."""
    members = [int(rank) for rank in allgather(torch.tensor([everybody.rank]), group)]
    claims = [given.tolist() for given in allgather(torch.tensor([min(members), group.size]), everybody)]
    firsts = [first for first, _ in claims]
    wrong = [rank for rank, (first, size) in enumerate(claims) if firsts.count(first) != size or firsts[first] != first]
    if wrong:
        raise ValueError(
            f"the groups of sync_every do not fit: those of ranks {wrong} are not within the last group, of "
            f"{everybody.size} ranks; give every rank the small group that it is in, and all of them one group of all"
        )
