"""Signals of a simulated world: events of its loop, each a message of 8 bytes later; links are not busy with them."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from communicators.errors import CollectiveError
from communicators.schedule import Schedule, among
from communicators.signals import Attempt, OnSignal, Signals, refuse_too_many_waiting

if TYPE_CHECKING:
    from communicators.simulated.event_loop import EventLoop, SimulatedCall
    from communicators.simulated.world import SimulatedCommunicator

Context: TypeAlias = tuple[int, ...]
"""A communicator of the world: () the first one, (2, 0) the first duplicate of its third duplicate."""
Listener: TypeAlias = Callable[[int, int], bool]
"""Takes source and value; says whether the signal waits now until it is polled."""

SIGNAL_BYTES = 8


class Watch:
    """Rank that waits for a condition which signals of a communicator bring about."""

    def __init__(self, rank: int, context: Context, over: Callable[[], bool]) -> None:
        self.rank, self.context, self.over = rank, context, over
        self.done = False
        self.waiter: Callable[[], None] | None = None

    def waits(self) -> str:
        """Phrase that says who waits for what."""
        return f"rank {self.rank} waits for a signal"


class SignalsInFlight:
    """Signals on their way; between two ranks the first that was sent is the first to come, whatever the jitter."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self._listeners: dict[tuple[Context, int], Listener] = {}
        self._early: defaultdict[tuple[Context, int], list[tuple[int, int]]] = defaultdict(list)
        self._sent: defaultdict[tuple[Context, int, int], deque[int]] = defaultdict(deque)
        self._left: set[tuple[Context, int]] = set()
        self._closing: set[tuple[Context, int]] = set()
        self._waiting: Counter[tuple[Context, int, int]] = Counter()

    def listen(self, context: Context, rank: int, listener: Listener) -> None:
        """Gives the rank's signals to the listener from now on, and first those that came before."""
        self._listeners[context, rank] = listener
        self._events.wish(lambda: self._events.guarded(context, rank, lambda: self._hear_early(context, rank)))

    def send(self, context: Context, source: int, target: int, value: int) -> None:
        """Sends a signal, which takes the time of a message of SIGNAL_BYTES, or none to the rank itself.

        A signal that is on its way is not sent again.
        """
        name = context, source, target
        if value in self._sent[name]:
            return
        self._sent[name].append(value)
        self._waiting[name] += 1

        def wish() -> None:
            seconds = 0.0 if source == target else self._events.seconds_for(SIGNAL_BYTES)
            arrive = partial(self._arrive, context, source, target)
            self._events.after(seconds, lambda: self._events.guarded(context, target, arrive))

        self._events.wish(wish)

    def leave(self, context: Context, rank: int) -> None:
        """Ends the signals of a rank: it hears nothing more, and the others know."""
        self._left.add((context, rank))

    def left(self, context: Context) -> frozenset[int]:
        """Ranks that have left."""
        return frozenset(rank for at, rank in self._left if at == context)

    def close(self, context: Context, rank: int) -> None:
        """Notes that a rank sends no more."""
        self._closing.add((context, rank))

    def closing(self, context: Context, rank: int) -> bool:
        """Whether a rank has said that it sends no more."""
        return (context, rank) in self._closing

    def on_their_way(self, context: Context, target: int) -> bool:
        """Whether any signals are on their way to this rank."""
        return any(sent for (at, _, to), sent in self._sent.items() if (at, to) == (context, target))

    def waiting(self, context: Context, source: int, target: int) -> int:
        """Number of signals between two ranks that are in flight, or have come and were not polled."""
        return self._waiting[context, source, target]

    def polled(self, context: Context, source: int, target: int) -> None:
        """Notes that a signal between two ranks was polled."""
        self._waiting[context, source, target] -= 1

    def _arrive(self, context: Context, source: int, target: int) -> None:
        value = self._sent[context, source, target].popleft()
        if self._events.is_dead(target) or (context, target) in self._left:
            self.polled(context, source, target)
            return
        if (context, target) in self._listeners:
            self._hear(context, source, target, value)
        else:
            self._early[context, target].append((source, value))

    def _hear_early(self, context: Context, rank: int) -> None:
        for source, value in self._early.pop((context, rank), []):
            self._hear(context, source, rank, value)

    def _hear(self, context: Context, source: int, target: int, value: int) -> None:
        if not self._listeners[context, target](source, value):
            self.polled(context, source, target)


POLL_SECONDS = 50e-6
"""Virtual cost of one `poll()`."""


class SimulatedSignals(Signals):
    """Signals of one simulated rank. comm: a duplicate that carries nothing else."""

    def __init__(self, comm: SimulatedCommunicator, on_signal: OnSignal | None) -> None:
        super().__init__(comm.rank, comm.size, on_signal)
        loop, context = comm.loop, comm.context
        self._loop, self._comm, self._context, self._closed = loop, comm, context, False
        self._unread: dict[tuple[int, int], None] = {}  # an ordered set
        self._watch: Watch | None = None
        loop.outlives(context)
        loop.signals.listen(context, comm.rank, self._arrived)

    def wait_until(self, over: Callable[[], bool], timeout: float) -> None:
        """Waits until a condition holds, without a time-out: where nothing more can happen, a deadlock is reported."""
        del timeout
        self._raise_failed()
        if not over():
            self._watch = Watch(self.rank, self._context, over)
            self._loop.wait_for(self._watch)
            self._raise_failed()

    def remind(self, seconds: float, value: int) -> None:
        """Sends a signal to this rank itself after `seconds` of virtual time."""
        context, rank = self._context, self.rank

        def send() -> None:
            self._loop.guarded(context, rank, lambda: self._loop.signals.send(context, rank, rank, value))

        live = lambda: rank not in self._loop.ended_ranks()  # noqa: E731
        self._loop.wish(lambda: self._loop.after(seconds, send, live))

    def fail(self, reason: str) -> None:
        self._loop.refuse_to_wait("fail()")
        self._loop.wish(lambda: self._loop.fail(reason, self._context))
        self._loop.sleep(self.rank, 0.0)

    def check(self) -> None:
        self._raise_failed()

    @property
    def departed(self) -> frozenset[int]:
        return (self._loop.ended_ranks() | self._loop.signals.left(self._context)) - {self.rank}

    def attempt(self, schedule: Schedule[Any], members: Sequence[int], *, facts: str) -> SimulatedAttempt:
        context = (*self._context, zlib.crc32(facts.encode()))
        self._loop.outlives(context)
        outside = among(schedule, members, facts)
        return SimulatedAttempt(self._loop, self._loop.submit(self.rank, outside, facts, math.inf, context))

    def leave(self, why: str) -> None:
        del why
        self._closed = True
        self._loop.signals.leave(self._context, self.rank)
        self._loop.wish(self._loop.look_around)

    def close(self) -> None:
        """Ends the signals on all ranks, as `Signals.close` says. Raises CollectiveError where a rank does not come."""
        self._loop.refuse_to_wait("close()")
        if self._closed:
            return
        self._closed = True
        if self._loop.poisoned(self._context) is None:
            self._loop.signals.close(self._context, self.rank)
            self._loop.wish(self._loop.look_around)
            self._loop.wait_for(Watch(self.rank, self._context, self._all_close))
            self._raise_failed()
            self._loop.sleep(self.rank, self._loop.world.link.seconds(SIGNAL_BYTES))  # the last one says so
            while self._loop.signals.on_their_way(self._context, self.rank):
                self._loop.sleep(self.rank, POLL_SECONDS)
        self._comm.close()

    def _all_close(self) -> bool:
        others = set(range(self.size)) - self.departed
        return all(self._loop.signals.closing(self._context, rank) for rank in others)

    def _send(self, peers: Sequence[int], value: int) -> None:
        self._raise_failed()
        if self._closed:
            raise CollectiveError("these signals are closed")
        for peer in peers:
            refuse_too_many_waiting(peer, self._loop.signals.waiting(self._context, self.rank, peer))
        for peer in peers:
            self._loop.signals.send(self._context, self.rank, peer, value)

    def _take(self) -> list[tuple[int, int]]:
        if not self._closed:
            self._loop.sleep(self.rank, POLL_SECONDS)
        if not self._unread:
            self._raise_failed()
        taken, self._unread = list(self._unread), {}
        for source, _ in taken:
            self._loop.signals.polled(self._context, source, self.rank)
        return taken

    def _arrived(self, source: int, value: int) -> bool:
        """Takes a signal from the loop; whether it now waits to be polled, and did not before."""
        if self._on_signal is not None:
            self._on_signal(source, value)
            self._loop.look_at(self._watch)
            return False
        new = (source, value) not in self._unread
        self._unread[source, value] = None
        return new

    def _raise_failed(self) -> None:
        if (poison := self._loop.poisoned(self._context)) is not None:
            raise CollectiveError(str(poison)) from poison.__cause__


class SimulatedAttempt(Attempt):
    """Attempt in a simulated world."""

    lost = None
    """None: its signals tell which ranks have departed."""

    def __init__(self, loop: EventLoop, outstanding: SimulatedCall) -> None:
        self._loop, self._outstanding = loop, outstanding

    @property
    def value(self) -> Any:
        return self._outstanding.call.value

    @property
    def error(self) -> CollectiveError | None:
        return self._outstanding.error

    def when_over(self, callback: Callable[[], None]) -> None:
        self._outstanding.when_over(callback)

    def cancel(self) -> None:
        self._loop.wish(lambda: self._loop.leave(self._outstanding))
