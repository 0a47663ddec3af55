"""Some ranks of a simulated world as a communicator of its own, as MPI's Split makes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from communicators.among import among
from communicators.communicator import Communicator, Work, refuse_too_many
from communicators.schedule import Schedule
from communicators.schedules.dense import barrier

T = TypeVar("T")


class Whole(Protocol):
    """Communicator of the whole world, as far as a group needs it."""

    rank: int
    timeout: float

    @property
    def bytes_sent(self) -> int: ...

    @property
    def messages_sent(self) -> int: ...

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]: ...

    def inner(self) -> Whole: ...

    def close(self) -> None: ...

    def clock(self) -> float: ...

    def elapse(self, seconds: float) -> None: ...


class SimulatedSubgroup(Communicator):
    """Communicator of some ranks of a simulated world.

    members: ranks of the world, in order; inside, they count from 0. Errors name ranks of the world.
    whole: a communicator of this rank in the world, with a context that no other group has.
    """

    def __init__(self, whole: Whole, members: Sequence[int]) -> None:
        self._whole, self._members = whole, list(members)
        self.rank, self.size = self._members.index(whole.rank), len(self._members)
        self.timeout = whole.timeout
        self._duplicates: list[SimulatedSubgroup] = []
        self._closed = False

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes sent by all communicators of the rank."""
        return self._whole.bytes_sent

    @property
    def messages_sent(self) -> int:  # type: ignore[override]
        """Messages sent by all communicators of the rank."""
        return self._whole.messages_sent

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        return self.start(schedule, facts=facts, timeout=timeout, device=device).wait()

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        outside = among(schedule, self._members, facts)
        return self._whole.start(outside, facts=facts, timeout=timeout, device=device)

    def duplicate(self) -> SimulatedSubgroup:
        self._duplicates = [made for made in self._duplicates if not made._closed]
        refuse_too_many(len(self._duplicates))
        self.run(barrier(self.rank, self.size), facts="duplicate of a group", timeout=self.timeout)
        made = SimulatedSubgroup(self._whole.inner(), self._members)
        self._duplicates.append(made)
        return made

    def close(self) -> None:
        self._closed = True
        self._whole.close()

    def clock(self) -> float:
        """Virtual seconds since the run began."""
        return self._whole.clock()

    def elapse(self, seconds: float) -> None:
        self._whole.elapse(seconds)
