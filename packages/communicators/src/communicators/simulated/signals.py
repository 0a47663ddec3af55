"""Signals of a simulated world: events of its loop, each a message of 8 bytes later; links are not busy with them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from communicators.among import among
from communicators.communicator import Communicator
from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.signals import Attempt, OnSignal, Signals, refuse_too_many_waiting
from communicators.simulated.event_loop import EventLoop
from communicators.simulated.signals_in_flight import SIGNAL_BYTES, Context
from communicators.simulated.waiting import SimulatedCall, Watch

POLL_SECONDS = 50e-6
"""Virtual cost of one `poll()`."""


class SimulatedSignals(Signals):
    """Signals of one simulated rank. comm: a duplicate that carries nothing else, named `context` in the loop."""

    def __init__(self, loop: EventLoop, comm: Communicator, context: Context, on_signal: OnSignal | None) -> None:
        super().__init__(comm.rank, comm.size, on_signal)
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
        """Calls back from the loop once there is a value or an error, at once if it is over."""
        self._loop.wish(lambda: self._outstanding.when_over(callback))

    def cancel(self) -> None:
        self._loop.wish(lambda: self._loop.leave(self._outstanding))
