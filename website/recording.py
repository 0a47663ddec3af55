"""What happens in a simulated world, written down: which messages travel from when to when, and who computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from communicators import Communicator, Link, SimulatedWorld
from communicators.simulated.timeline import Sent


@dataclass(frozen=True)
class Computed:
    """A rank computes, from when to when in virtual seconds."""

    rank: int
    began: float
    ended: float


@dataclass
class Recording:
    """What happened from `begin` on; times count from there."""

    size: int
    begin: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)

    def compute(self, comm: Communicator, seconds: float) -> None:
        """Computes on this rank, and writes it down."""
        began = comm.clock()
        comm.elapse(seconds)
        self.computed.append(Computed(comm.rank, began, comm.clock()))

    def from_here(self, comm: Communicator) -> None:
        """Preparations end here; the last rank that says so counts."""
        self.begin = max(self.begin, comm.clock())

    def finished(self) -> Recording:
        """What was written down, without preparations, in the order of time."""
        sent = [
            Sent(s.source, s.target, s.nbytes, s.began - self.begin, s.ended - self.begin)
            for s in self.sent
            if s.began >= self.begin
        ]
        computed = [Computed(c.rank, c.began - self.begin, c.ended - self.begin) for c in self.computed]
        sent.sort(key=lambda s: (s.began, s.source, s.target))
        computed.sort(key=lambda c: (c.began, c.rank))
        return Recording(self.size, 0.0, sent, computed)

    @property
    def seconds(self) -> float:
        """Until the last of it has ended."""
        return max([each.ended for each in self.sent] + [each.ended for each in self.computed])

    @property
    def most_bytes(self) -> int:
        """Sent by the busiest rank."""
        return max(sum(s.nbytes for s in self.sent if s.source == rank) for rank in range(self.size))


def record(body: Callable[[Communicator, Recording], Any], *, size: int = 4, link: Link) -> Recording:
    """What happens where every rank runs body(comm, recording)."""
    recording = Recording(size)

    world = SimulatedWorld(size, link=link, records=True)
    world.run(lambda comm: body(comm, recording))
    recording.sent = world.timeline.sent
    return recording.finished()
