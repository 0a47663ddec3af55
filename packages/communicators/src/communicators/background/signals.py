"""Signals over a transport: on a duplicate of the communicator, read and written by the engine at its own pace.

One message at a time is in flight to each peer; it carries what has gathered meanwhile. The last one says that no
more will come. So memory is bounded, and a rank that has heard that from all peers has heard all of their signals.
"""

import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from communicators import errors
from communicators.background.control import Control, RequestedAbort
from communicators.background.engine import Driven, Engine
from communicators.background.sends import GRACE_SECONDS
from communicators.background.transport import PeerLost, SignalLine, wrong_return
from communicators.communicator import Communicator
from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.signals import Attempt, OnSignal, Signals, refuse_too_many_waiting

MOST_VALUES = 64
"""Most values in one message."""
MOST_UNREAD = 4096
"""Most signals that wait for `poll()`; beyond, messages are left with the transport, and their senders wait."""
LOOK_SECONDS = 0.1
"""Longest interval between two checks by a waiting rank."""
FAIL_SECONDS = 10.0
"""Upper bound on a failure: by then all ranks have agreed on a reason, or this rank has raised its own."""

_HEAD = struct.Struct("<IHH")  # checksum of the rest, whether it is the last one, number of values


class TransportSignals(Signals, Driven):
    """Signals of one rank over a communicator that carries nothing else; the engine sends and receives them.

    control, engine: the communicator's.
    """

    def __init__(self, comm: Communicator, control: Control, engine: Engine, on_signal: OnSignal | None) -> None:
        super().__init__(comm.rank, comm.size, on_signal)
        self._comm, self._control, self._engine = comm, control, engine
        self._line = control.transport.signal_line()
        if not isinstance(self._line, SignalLine):
            raise wrong_return(control.transport, "signal_line", self._line, "a SignalLine")
        self._others = frozenset(range(comm.size)) - {comm.rank}
        self._waiting: dict[int, dict[int, None]] = {}  # ordered sets; of peers to whom something waits or is in flight
        self._told, self._heard = set[int](), set[int]()  # who the last message went to, and came from
        self._left: dict[int, float] = {}  # since when a peer is known to have departed
        self._lock = threading.Lock()
        self._leaving = False
        self._over, self._news = threading.Event(), threading.Event()
        self._fail_with = ""  # reason for which this rank would have all ranks fail
        self._requested: RequestedAbort | None = None
        self._cause: BaseException | None = None
        self.progressed = time.monotonic()
        self._engine.add(self)

    # Called in any thread but the engine's.

    @property
    def woken(self) -> bool:
        idle = not self._waiting and not self._closed and len(self._unread) < MOST_UNREAD
        return idle and self._control.transport.notices

    @property
    def departed(self) -> frozenset[int]:
        return frozenset(self._control.departed) | self._control.lost

    def wait_until(self, over: Callable[[], bool], timeout: float) -> None:
        end = time.monotonic() + timeout
        self.progressed = time.monotonic()  # who waits is not kept waiting by naps that had grown meanwhile
        self._engine.wake()
        while True:
            self._news.clear()  # before it is looked at, so that nothing that comes meanwhile is missed
            if over():
                return
            self.check()
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"not within {timeout:g} s")
            self._news.wait(min(left, LOOK_SECONDS))

    def fail(self, reason: str) -> None:
        """Fails the signals on all ranks, as `Signals.fail` says; not in `on_signal`, which may raise the reason."""
        if self._engine.on_thread():
            raise RuntimeError("fail() in on_signal would wait for itself: raise a CollectiveError there")
        self._fail_with = reason
        self._ends_within(FAIL_SECONDS)

    def check(self) -> None:
        reason = self._control.abort_reason
        if reason is not None:
            mine = self._requested is not None and self._requested.reason == reason
            raise CollectiveError(reason) from (self._cause if mine else None)

    def attempt(self, schedule: Schedule[Any], members: Sequence[int], *, facts: str) -> Attempt:
        if not self._comm.outlives_ranks:
            return super().attempt(schedule, members, facts=facts)
        return cast(Attempt, self._comm.aside(schedule, members, facts=facts))

    def leave(self, why: str) -> None:
        self._control.depart(why)
        self._leaving = True
        self._ends_within(FAIL_SECONDS)

    def remind(self, seconds: float, value: int) -> None:
        self._engine.add(Reminder(time.monotonic() + seconds, lambda: self._put([self.rank], value)))

    def close(self) -> None:
        """Ends the signals on all ranks, as `Signals.close` says; not in `on_signal`, which the engine calls."""
        if self._engine.on_thread():
            raise RuntimeError("close() in on_signal would wait for itself: call it where the signals were made")
        if self._closed:
            return
        self._closed = True  # nothing more is sent but what waits
        timed_out = "" if self._ends_within(self._comm.timeout) else self._time_out()
        with suppress(TimeoutError):  # no word of one that has closed its signals, or departed: nobody is awaited
            self._comm.close()
        if timed_out:
            raise TimeoutError(timed_out)

    def _ends_within(self, seconds: float) -> bool:
        self._engine.wake()
        return self._over.wait(seconds)

    def _time_out(self) -> str:
        """Fails the signals on all ranks because some do not close; returns the reason."""
        unfinished = sorted(self._others - self.departed - self._heard)
        reason = (
            f"timed out after {self._comm.timeout:g} s: rank {self.rank} closes its signals, but ranks "
            f"{unfinished} do not: all ranks must"
        )
        self.fail(reason)
        return reason

    def _send(self, peers: Sequence[int], value: int) -> None:
        self._put(peers, value)
        self._engine.wake()

    def _put(self, peers: Sequence[int], value: int) -> None:
        """Queues a signal to each of these peers."""
        departed = self.departed
        with self._lock:
            self._refuse_if_closed()
            peers = [peer for peer in peers if peer not in departed and value not in self._waiting.get(peer, {})]
            for peer in peers:
                refuse_too_many_waiting(peer, len(self._waiting.get(peer, {})))
            for peer in peers:
                self._waiting.setdefault(peer, {})[value] = None

    def _take(self) -> list[tuple[int, int]]:
        with self._lock:
            return super()._take()

    # Called by the engine.

    def advance(self) -> bool:
        """Sends and receives signals; True once they have ended or failed."""
        if self._fail_with and self._requested is None:
            self._requested = RequestedAbort(self._control, self._fail_with)
        if self._requested is not None and not self._requested.settled():
            return False
        if self._control.abort_reason is not None or self._leaving:
            self._end()
            return True
        try:
            return self._go_on()
        except Exception as error:  # also where `on_signal` has raised
            self._fail_with, self._cause = errors.reason(self._comm.rank, "its signals", error), error
            return False

    def abandon(self, error: BaseException | None) -> None:
        """Ends the traffic."""
        del error
        self._end()

    def _go_on(self) -> bool:
        """Receives and sends what there is; True at the end."""
        came = self._receive()
        went = bool(self._waiting or self._closed) and self._send_waiting()
        if came or went:
            self.progressed = time.monotonic()
        if self._closed and not self._waiting and all(self._finished_with(peer) for peer in self._others):
            self._end()
            return True
        return False

    def _receive(self) -> bool:
        if len(self._unread) >= MOST_UNREAD and not self._closed:
            return False
        messages = self._line.received()
        for source, message in messages:
            values, last = _unpacked(message, self._comm.rank)
            self._deliver(source, values)
            if last:
                self._heard.add(source)
        return bool(messages)

    def _deliver(self, source: int, values: Sequence[int]) -> None:
        if self._on_signal is None:
            with self._lock:
                self._unread.update(((source, value), None) for value in values)
            return
        for value in values:
            self._on_signal(source, value)
        self._news.set()

    def _send_waiting(self) -> bool:
        went, departed = False, self.departed
        with self._lock:
            if self._closed:  # in the lock: what was put before comes before
                self._waiting = {**{peer: {} for peer in self._others - self._told}, **self._waiting}
            active = list(self._waiting)
        for peer in active:
            if peer in departed:
                with self._lock:
                    del self._waiting[peer]
            elif self._sent(peer):
                went = self._send_next(peer) or went
        return went

    def _send_next(self, peer: int) -> bool:
        """Sends the next message to a peer, if there is one; whether there were signals in it."""
        values, last = self._next_for(peer)
        if peer == self._comm.rank:
            self._deliver(peer, values)
        elif values or last:
            self._line.send(peer, _packed(values, last))
        return bool(values)

    def _sent(self, peer: int) -> bool:
        """Whether nothing is in flight to this peer."""
        if peer == self._comm.rank:
            return self._closed or len(self._unread) < MOST_UNREAD
        try:
            if (sent := self._line.sent(peer)) is None:
                raise wrong_return(self._line, "sent", None, "True or False")
            return sent
        except PeerLost:
            self._control.lose(peer)
            return False

    def _next_for(self, peer: int) -> tuple[list[int], bool]:
        """Values of the next message to a peer, and whether it is the last; without one nothing waits any more."""
        with self._lock:
            waiting = self._waiting[peer]
            values = list(waiting)[:MOST_VALUES]
            for value in values:
                del waiting[value]
            last = self._closed and not waiting and peer in self._others - self._told
            if last:
                self._told.add(peer)
            if not values and not last:
                del self._waiting[peer]
            return values, last

    def _finished_with(self, peer: int) -> bool:
        """Whether nothing more comes from this peer, or goes to it."""
        if peer in self._heard and peer in self._told:
            return True
        now = time.monotonic()
        return peer in self.departed and now - self._left.setdefault(peer, now) > GRACE_SECONDS

    def _end(self) -> None:
        self._news.set()
        if not self._over.is_set():
            self._over.set()
            self._line.close()


class Reminder(Driven):
    """Action that the engine takes at a given time."""

    def __init__(self, due: float, action: Callable[[], None]) -> None:
        self._due, self._action = due, action
        self.progressed = time.monotonic()

    def advance(self) -> bool:
        """Takes the action once it is due."""
        if time.monotonic() < self._due:
            return False
        self._action()
        return True


def _packed(values: Sequence[int], last: bool) -> bytes:
    rest = struct.pack(f"<HH{len(values)}q", last, len(values), *values)
    return zlib.crc32(rest).to_bytes(4, "little") + rest


def _unpacked(message: bytes, rank: int) -> tuple[tuple[int, ...], bool]:
    """Values of a message, and whether it was the last; the message may be longer than it says."""
    check, last, count = _HEAD.unpack_from(message.ljust(_HEAD.size, b"\0"))
    end = _HEAD.size + 8 * count
    if count > MOST_VALUES or end > len(message) or zlib.crc32(message[4:end]) != check:
        raise CollectiveError(f"rank {rank} got a corrupted signal: the network changes bits")
    return struct.unpack_from(f"<{count}q", message, _HEAD.size), bool(last)
