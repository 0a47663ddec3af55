"""Two levels: frequent means among a few ranks, such as those of one machine, and the algorithm among all, rarely."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from communicators import Communicator, allgather, as_communicator
from replicas import check_like

from local_sgd.averaging import Averaging, refuse_nonfinite
from local_sgd.compression import ResidualSum
from local_sgd.driver import Block, Driver
from local_sgd.settings import Every, Settings, whole

Levels: TypeAlias = Sequence[tuple[Any, int]]
"""[(this rank's small group, steps between its means), (all ranks, steps between boundaries)]"""


def boundaries_of(sync_every: Every | Levels, sums: ResidualSum | None, settings: Settings) -> tuple[Driver, Every]:
    """Boundaries of one level or two, and τ among all ranks; of two `settings` gets the last level's group as comm.

    Raises:
        TypeError: A number of steps is no whole number.
        ValueError: There are not two levels, or they do not fit each other or `comm`.
    """
    if callable(sync_every) or not isinstance(sync_every, Sequence):
        return Driver(sums), sync_every
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
    return TwoLevels(sums, group, often, seldom // often), seldom


class TwoLevels(Driver):
    """Means by weight in this rank's small group besides; after `times` of them comes a boundary among all ranks."""

    two_levels = True
    inelastic = "the small group of a rank cannot change: give sync_every as one number"

    def __init__(self, sums: ResidualSum | None, group: Any, every: int, times: int) -> None:
        super().__init__(sums)
        self._given, self._times = group, times
        self._near, self._met = Block(every), 0  # means in the group since the last boundary among all

    def facts(self) -> dict[str, Any]:
        """The group's means besides."""
        return {**super().facts(), "levels": f"{self._near.every} steps, {self._times} times"}

    def connect(self) -> None:
        """Makes the exchange within the group besides."""
        self._group, self.nearest = as_communicator(self._given), self._near
        _refuse_gaps(self._group, self.comm)
        self.comms = [self.comm, self._group]
        self._within = Averaging(self._group, f"{self.what} in its group", native=self._sum["native"])
        super().connect()

    def count(self, weight: float) -> None:
        """Counts a step; averages within the small group, and exchanges among all ranks, where that is due."""
        if self._near.count(weight):
            self._meet(finished=False)
        super().count(weight)

    def end(self, *, most: int | None) -> None:
        """Averages within the group until all its ranks have finished, then ends among all."""
        while unfinished := self._meet(finished=True):
            if most is not None:
                self.refuse_undrained(unfinished)
            if self._launches_by_now():
                self._exchange(finished=False)
                self._end_block()
        super().end(most=most)

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """Position between two means of the group besides."""
        del waits
        return {**super().state_dict(), "near": {"met": self._met, "block": self._near.state_dict()}}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError also for a position that is none."""
        super().check(state)
        check_like(state["near"], {"met": 0, "block": self._near.state_dict()}, "near")

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._met = state["near"]["met"]
        self._near.load_state_dict(state["near"]["block"])

    def _launches_by_now(self) -> int:
        return int(self._met >= self._times)

    def _end_block(self) -> None:
        super()._end_block()
        self._met = 0

    def _meet(self, *, finished: bool) -> int:
        """Averages within this rank's small group; returns how many of its ranks had not finished."""
        self.owner.check_exchange()
        xs = [part.gather() for part in self.parts]
        arrived = self._within.now(xs, self.own_weight(self._near), finished=finished)
        refuse_nonfinite(self.parts, arrived.means, self._group, f"{self.what} in its group")
        self.put(self.parts, arrived.means or xs)
        self._near.end()
        self._met += 1
        return arrived.unfinished


def _refuse_gaps(group: Communicator, everybody: Communicator) -> None:
    """Raises ValueError, on all ranks alike, unless every rank is in one group, and its ranks agree on that group."""
    members = [int(rank) for rank in allgather(torch.tensor([everybody.rank], device="cpu"), group)]
    claims = [given.tolist() for given in allgather(torch.tensor([min(members), group.size], device="cpu"), everybody)]
    firsts = [first for first, _ in claims]
    wrong = [rank for rank, (first, size) in enumerate(claims) if firsts.count(first) != size or firsts[first] != first]
    if wrong:
        raise ValueError(
            f"the groups of sync_every do not fit: those of ranks {wrong} are not within the last group, of "
            f"{everybody.size} ranks; give every rank the small group that it is in, and all of them one group of all"
        )
