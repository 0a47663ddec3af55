"""Timeline of a simulated world in virtual time: who computes, who waits, and which message travels when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from communicators import timeline


@dataclass(frozen=True)
class Span:
    """Time of a rank, in virtual seconds: "compute", "merge" or "wait"."""

    rank: int
    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class Sent:
    """Message of so many bytes, from its departure to its arrival in virtual seconds."""

    source: int
    target: int
    nbytes: int
    began: float
    ended: float


@dataclass
class Timeline:
    """Spans and messages of one run of a world of `size` ranks."""

    size: int
    spans: list[Span] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    def trace(self) -> dict[str, Any]:
        """The same in the trace event format."""
        events = [timeline.bar(one.rank, one.name, one.name, one.began, one.ended) for one in self.spans]
        for number, one in enumerate(self.sent):
            for rank, way, peer in ((one.source, "to", one.target), (one.target, "from", one.source)):
                args = {"way": way, "peer": peer, "bytes": one.nbytes, "key": str(number)}
                events.append(timeline.bar(rank, way, f"{way} rank {peer}", one.began, one.ended, **args))
        for rank in range(self.size):
            events += timeline.about(rank, rank, process_name={"name": f"rank {rank}"})
        return timeline.assembled(events, within=[0.0] * self.size)
