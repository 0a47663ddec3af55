"""Signals of a simulated world: events of its loop, each a message of 8 bytes later; links are not busy with them."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from communicators.communicator import Communicator
from communicators.errors import CollectiveError
from communicators.schedule import Schedule, among
from communicators.signals import Attempt, OnSignal, Signals, refuse_too_many_waiting
from communicators.simulated.event_loop import POLL_SECONDS, EventLoop
from communicators.simulated.ranks import Context, Watch

SIGNAL_BYTES = 8


class SignalGroup:
    """Signals of all ranks on one communicator. early: those that came to a rank before it has made its own.

    left: ranks that hear nothing more.
    """

    def __init__(self) -> None:
        self.members: dict[int, SimulatedSignals] = {}
        self.left: set[int] = set()
        self.early: defaultdict[int, list[tuple[SimulatedSignals, int]]] = defaultdict(list)


class SimulatedSignals(Signals):
    """Signals of one simulated rank. comm: a duplicate that carries nothing else. places: of its ranks in the world.

    Between two ranks the first that was sent is the first to come, whatever the jitter. One that is on its way is not
    sent again. closing: it sends no more. hasty: whether a wait has its time-out; else, where nothing more can happen,
    a deadlock is reported.
    """

    def __init__(
        self,
        comm: Communicator,
        loop: EventLoop,
        context: Context,
        places: Sequence[int],
        on_signal: OnSignal | None,
        *,
        hasty: bool,
    ) -> None:
        super().__init__(comm.rank, comm.size, on_signal)
        self._comm, self._loop, self._context, self._hasty = comm, loop, context, hasty
        self._place, self._places = places[comm.rank], places
        self._group: SignalGroup = loop.signals.setdefault(context, SignalGroup())
        self._sent: defaultdict[int, deque[int]] = defaultdict(deque)  # on their way, by peer
        self._waiting: Counter[int] = Counter()  # on their way, or come and not polled, by peer
        self._watch: Watch | None = None
        self.closing = False
        self._group.members[self.rank] = self
        self._loop.outliving.add(self._context)
        self._loop.wish(partial(self._loop.guarded, self._context, self._place, self._hear_early))

    def wait_until(self, over: Callable[[], bool], timeout: float) -> None:
        self.check()
        if over():
            return
        loop, end = self._loop, self._loop.now + timeout if self._hasty else math.inf
        if self._hasty:
            loop.wish(lambda: loop.after(timeout, loop.look_around))
        self._watch = Watch(self._place, self._context, lambda: over() or loop.now >= end)
        loop.watch(self._watch)
        self.check()
        if loop.now >= end and not over():
            raise TimeoutError(f"not within {timeout:g} s")

    def remind(self, seconds: float, value: int) -> None:
        """Sends a signal to this rank itself after `seconds` of virtual time."""
        send = partial(self._loop.guarded, self._context, self._place, partial(self._put, self.rank, value))
        self._loop.wish(lambda: self._loop.after(seconds, send, partial(self._loop.lives, self._place)))

    def fail(self, reason: str) -> None:
        self._loop.refuse_to_wait("fail()")
        self._loop.wish(lambda: self._loop.fail(reason, self._context))
        self._loop.sleep(self._place, 0.0)

    def check(self) -> None:
        if (poison := self._loop.poisoned(self._context)) is not None:
            raise CollectiveError(str(poison)) from poison.__cause__

    @property
    def departed(self) -> frozenset[int]:
        return frozenset({*self._comm.ended, *self._group.left} - {self.rank})

    def attempt(self, schedule: Schedule[Any], members: Sequence[int], *, facts: str) -> Attempt:
        context = (*self._context, zlib.crc32(facts.encode()))
        self._loop.outliving.add(context)
        places = [self._places[member] for member in members]
        return self._loop.submit(self._place, among(schedule, places, facts), facts, math.inf, context, self._places)

    def leave(self, why: str) -> None:
        del why
        self._closed = True
        self._group.left.add(self.rank)
        self._loop.wish(self._loop.look_around)

    def close(self) -> None:
        """Ends the signals on all ranks, as `Signals.close` says. Raises CollectiveError where a rank does not come."""
        self._loop.refuse_to_wait("close()")
        if self._closed:
            return
        self._closed = True
        if self._loop.poisoned(self._context) is None:
            self.closing = True
            self._loop.wish(self._loop.look_around)
            self._loop.watch(Watch(self._place, self._context, self._all_close))
            self.check()
            paths = [self._loop.world.paths(self._place, there) for there in self._places]
            self._loop.sleep(self._place, max(path.seconds(SIGNAL_BYTES) for path in paths))  # the last one says so
            while any(one._sent[self.rank] for one in self._group.members.values()):
                self._loop.sleep(self._place, POLL_SECONDS)
        self._comm.close()

    def _all_close(self) -> bool:
        others, members = set(range(self.size)) - self.departed, self._group.members
        return all(rank in members and members[rank].closing for rank in others)

    def _send(self, peers: Sequence[int], value: int) -> None:
        self._refuse_if_closed()
        for peer in peers:
            refuse_too_many_waiting(peer, self._waiting[peer])
        for peer in peers:
            self._put(peer, value)

    def _put(self, peer: int, value: int) -> None:
        if value not in self._sent[peer]:
            self._sent[peer].append(value)
            self._waiting[peer] += 1
            self._loop.wish(partial(self._post, peer))

    def _post(self, peer: int) -> None:
        """Sends a signal, which takes the time of a message of SIGNAL_BYTES, or none to the rank itself."""
        there = self._places[peer]
        seconds = 0.0 if peer == self.rank else max(self._loop.seconds_for(self._place, there, SIGNAL_BYTES))
        arrive = partial(self._loop.guarded, self._context, there, partial(self._arrive, peer))
        self._loop.after(seconds, partial(self._loop.let_through, self._place, there, arrive))

    def _arrive(self, peer: int) -> None:
        value, there = self._sent[peer].popleft(), self._group.members.get(peer)
        if self._loop.ranks[self._places[peer]].dead or peer in self._group.left:
            self._waiting[peer] -= 1
        elif there is None:
            self._group.early[peer].append((self, value))
        else:
            there._hear(self, value)

    def _hear_early(self) -> None:
        for sender, value in self._group.early.pop(self.rank, []):
            self._hear(sender, value)

    def _hear(self, sender: SimulatedSignals, value: int) -> None:
        """Takes a signal from the loop: it is dealt with at once, or waits to be polled, unless it did so before."""
        if self._on_signal is None and (sender.rank, value) not in self._unread:
            self._unread[sender.rank, value] = None
            return
        if self._on_signal is not None:
            self._on_signal(sender.rank, value)
            self._loop.look_at(self._watch)
        sender._waiting[self.rank] -= 1

    def _take(self) -> list[tuple[int, int]]:
        if not self._closed:
            self._loop.sleep(self._place, POLL_SECONDS)
        taken = super()._take()
        for source, _ in taken:
            self._group.members[source]._waiting[self.rank] -= 1
        return taken
