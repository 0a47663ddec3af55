"""Ports and faults of a simulated world.

A rank sends one message and receives one message at a time, first come first served.

Links are eager: a message keeps both ports busy for α + β·bytes from the moment that both are free, whether or not
its receiver has posted the receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from communicators.link import Path
from communicators.schedule import Payload


@dataclass(frozen=True)
class Conditions:
    """Conditions of a simulated world, as `SimulatedWorld` describes them.

    paths: (source, target) -> what a message between them costs. deaths: ranks that die at a time. faults: by rank,
    and number of its message. outages: begin and end, of boards. dark: links that are lost for a while.
    """

    size: int
    paths: Callable[[int, int], Path]
    slowdown: tuple[float, ...]
    jitter: float
    deaths: list[tuple[int, float]]
    faults: dict[tuple[int, int], Dies | Corrupts]
    outages: list[tuple[float, float]] = field(default_factory=list)
    dark: list[LinkLost] = field(default_factory=list)

    def dark_until(self, rank: int, peer: int | None, now: float) -> float:
        """End of what keeps messages between two ranks (None: the board) from coming now; `now` where nothing does."""
        return max((lost.end for lost in self.dark if lost.at <= now < lost.end and lost.hits(rank, peer)), default=now)

    def dark_among(self, ranks: Sequence[int], now: float) -> float:
        """The same between any two of these ranks."""
        within = (lost for lost in self.dark if lost.rank in ranks and lost.peer in (None, *ranks) and len(ranks) > 1)
        return max((lost.end for lost in within if lost.at <= now < lost.end), default=now)


@dataclass(eq=False)
class Message:
    """A payload on its way. delivered: called when it has left its sender and reached its receiver."""

    source: int
    target: int
    payload: Payload
    delivered: Callable[[], None] = field(repr=False)


class Ports:
    """The ports of all ranks. after(seconds, action) is the clock.

    seconds_for(source, target, nbytes): of a message, until the sender and until the receiver is free.
    departs(message, seconds): called when a message departs, to arrive so much later.
    """

    def __init__(
        self,
        size: int,
        after: Callable[[float, Callable[[], None]], None],
        seconds_for: Callable[[int, int, int], tuple[float, float]],
        departs: Callable[[Message, float], None] = lambda message, seconds: None,
    ) -> None:
        self._after, self._seconds_for, self._departs = after, seconds_for, departs
        self._sending, self._receiving = [False] * size, [False] * size
        self._from: list[list[Message]] = [[] for _ in range(size)]
        self._to: list[list[Message]] = [[] for _ in range(size)]

    def post(self, message: Message) -> None:
        """Sends the message as soon as both of its ports are free."""
        self._from[message.source].append(message)
        self._to[message.target].append(message)
        self._depart(message)

    def _depart(self, message: Message) -> None:
        source, target = message.source, message.target
        if self._sending[source] or self._receiving[target]:
            return
        self._sending[source] = self._receiving[target] = True
        self._from[source].remove(message)
        self._to[target].remove(message)
        up, down = self._seconds_for(source, target, message.payload.wire_nbytes)
        self._departs(message, max(up, down))
        if up < down:
            self._after(up, lambda: self._free(message, self._sending, source))
        if down < up:
            self._after(down, lambda: self._free(message, self._receiving, target))
        self._after(max(up, down), lambda: self._arrive(message, up, down))

    def _free(self, message: Message, ports: list[bool], rank: int) -> None:
        ports[rank] = False
        self._depart_next(message)

    def _arrive(self, message: Message, up: float, down: float) -> None:
        """Frees what is not free yet: the sender, the receiver, or both."""
        if up >= down:
            self._sending[message.source] = False
        if down >= up:
            self._receiving[message.target] = False
        self._depart_next(message)  # what waits goes before what follows from this message
        message.delivered()

    def _depart_next(self, message: Message) -> None:
        for waiting in (*self._from[message.source], *self._to[message.target]):
            self._depart(waiting)


@dataclass(frozen=True)
class Dies:
    """Fault: a rank is gone when it would send a message, or at a virtual time.

    Every call of all ranks ends with an error that names it; signals and attempts go on among the others, who see it in
    `Signals.departed`. Nothing of its own goes on, and its result is None.

    Attributes:
        rank: Rank that dies.
        message: The number of the message that it does not send any more; 0 is its first.
        at: Virtual seconds, in place of `message`.
    """

    rank: int
    message: int = 0
    at: float | None = None


@dataclass(frozen=True)
class Corrupts:
    """Fault: a message arrives with one bit flipped.

    Attributes:
        rank: Rank that sends the message.
        message: Its number among those that the rank sends, from 0.
        bit: Number of the flipped bit, modulo the message's number of bits.
    """

    rank: int
    message: int = 0
    bit: int = 0


@dataclass(frozen=True)
class BoardLost:
    """The board on which elastic ranks meet does not answer for a while: who asks it waits until it is back.

    Args:
        at: Virtual seconds after which that begins.
        seconds: How long it lasts.
    """

    at: float
    seconds: float


@dataclass(frozen=True)
class LinkLost:
    """Messages between two ranks do not come for a while: they are held back, and come when it is over.

    Args:
        rank: One of the two.
        peer: The other one; None: all others, and the board on which elastic ranks meet.
        at: Virtual seconds after which that begins.
        seconds: How long it lasts.
    """

    rank: int
    peer: int | None
    at: float
    seconds: float

    @property
    def end(self) -> float:
        """Virtual seconds at which messages come again."""
        return self.at + self.seconds

    def hits(self, rank: int, peer: int | None) -> bool:
        """Whether it is between these two (None: the board)."""
        others = self.peer is None and self.rank in (rank, peer) and rank != peer
        return others or {rank, peer} == {self.rank, self.peer}
