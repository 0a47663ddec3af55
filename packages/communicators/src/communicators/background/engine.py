"""The one background engine of a process: drives what was started, listens on control channels, departs at exit.

The only process-wide object of the package. Where a transport may not be driven by another thread (MPI without
THREAD_MULTIPLE), the same work is done inside our calls only.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Protocol

from communicators import errors

LISTEN_SECONDS = 0.05
BUSY_SECONDS = 50e-6
SPIN_SECONDS = 100e-6
LONGEST_NAP_SECONDS = 200e-6
IDLE_SECONDS = 1e-3
FAILED_DEPARTURE_SECONDS = 5.0
"""Longest time that the end of a process waits for the peers of a communicator that has failed."""

logger = logging.getLogger(__name__)


class Driven(Protocol):
    """Work that progresses when it is advanced, by the engine or by the thread that waits for it, never by both.

    progressed: time of its last progress, by time.monotonic(): the longer ago, the more rarely it is advanced.
    lingers: whether its owner has gone on without it. Then it is driven to its end before the process ends.
    """

    progressed: float
    lingers: bool

    def advance(self) -> bool:
        """Progresses as far as it can without blocking; True once it is over, after which it is not advanced again."""

    def watch(self) -> None:
        """Looks at the clock; called every few milliseconds while nothing advances."""

    def abandon(self, error: BaseException | None) -> None:
        """Releases work that is not advanced again. error: what it raised itself, None where the process ends."""


class ControlListener(Protocol):
    """Communicator whose control messages the engine reads.

    threaded: whether another thread may read them while its owner computes.
    """

    @property
    def threaded(self) -> bool: ...

    def listen(self) -> None:
        """Reads the control messages that have come."""

    def depart(self, why: str) -> None:
        """Tells all peers that this rank departs."""

    def awaited(self) -> list[int]:
        """The peers that may still say that they depart."""

    def missing(self) -> list[int]:
        """The peers that have not departed."""

    def departure_seconds(self) -> float:
        """Longest wait for the peers' departure, in seconds."""

    def release(self) -> None:
        """Lets go of the transport."""

    def fail(self, error: BaseException) -> None:
        """Fails the communicator, whose transport has failed on this rank."""


@cache
def engine() -> Engine:
    """The engine of this process, made at its first use."""
    made = Engine()
    atexit.register(made.close)
    return made


class Alarm:
    """Nap that another thread can end; a lock, as an Event takes twice as much of the core, 1,000 times a second."""

    def __init__(self) -> None:
        self._ringing = threading.Lock()
        self._ringing.acquire()

    def set(self) -> None:
        """Ends the nap, or the next one if nobody naps."""
        with suppress(RuntimeError):  # it rings already
            self._ringing.release()

    def wait(self, seconds: float) -> None:
        """Naps for at most `seconds`."""
        self._ringing.acquire(timeout=seconds)


class Ending:
    """Event that is cheaper than threading's: every call has one, and hardly any is waited for."""

    def __init__(self) -> None:
        self._before = threading.Lock()
        self._before.acquire()
        self._set = False

    def is_set(self) -> bool:
        """Whether the end has come."""
        return self._set

    def set(self) -> None:
        """Marks the end; called by one thread at a time."""
        if not self._set:
            self._set = True
            self._before.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most `timeout` seconds; returns whether it has come."""
        if self._set:
            return True
        if self._before.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            self._before.release()  # for the next one who waits
        return self._set


class Engine:
    """Drives started work in the background, and reads the control messages of communicators."""

    def __init__(self) -> None:
        self._driven: list[Driven] = []
        self._listeners: weakref.WeakSet[ControlListener] = weakref.WeakSet()
        self._lock = threading.Lock()  # of the set, which grows in one thread while another walks it
        self._alarm = Alarm()
        self.wake = self._alarm.set  # ends a nap at once, because work that is driven has news
        self._closing = False
        self._process = os.getpid()
        self.inline = False
        self._listened = 0.0
        self._thread: threading.Thread | None = None

    @property
    def drives(self) -> bool:
        """Whether added work progresses while its owner computes."""
        return not self.inline and not self._closing

    def listen_to(self, listener: ControlListener) -> None:
        """Reads the listener's control messages from now on."""
        with self._lock:
            self._listeners.add(listener)
        if not listener.threaded:
            if not self.inline:
                logger.warning("this MPI was not initialised with THREAD_MULTIPLE: progress only inside our calls")
            self.inline = True
        elif self._thread is None and not self.inline:
            self._thread = threading.Thread(target=self._live, name="communicators-engine", daemon=True)
            self._thread.start()

    def forget(self, listener: ControlListener) -> None:
        """Stops reading the listener's control messages."""
        with self._lock:
            self._listeners.discard(listener)

    def add(self, driven: Driven) -> None:
        """Drives work in the background, from now on."""
        self._driven.append(driven)
        self.wake()

    def drive(self, driven: Driven, nap: Callable[[float], None]) -> None:
        """Polls work to its end in the calling thread.

        It spins at first in every round, then naps in proportion to the wait: where ranks outnumber cores, they would
        otherwise spin in the way of the one that they wait for.
        """
        while not driven.advance():
            waited = time.monotonic() - driven.progressed
            if self.inline:  # what was started before has no other thread
                self._advance_all()
            if waited > SPIN_SECONDS:
                nap(min(waited / 8, LONGEST_NAP_SECONDS))
                self._look_around([driven])

    def wait(self, finished: Ending, timeout: float | None) -> bool:
        """Waits for the end of added work; False when it is not over in time."""
        if not self.inline:
            return finished.wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._advance_all()
        while not finished.is_set() and (end is None or time.monotonic() < end):
            time.sleep(BUSY_SECONDS)
            self._advance_all()
        return finished.is_set()

    def drain(self, kind: Callable[[Driven], bool] = lambda driven: True) -> None:
        """Waits until no work of this kind lingers, in the calling thread where the engine's has ended."""
        while any(driven.lingers and kind(driven) for driven in list(self._driven)):
            if not self.drives:
                self._advance_all()
                for listener in self._listened_to():
                    _guarded(listener, listener.listen)
            time.sleep(BUSY_SECONDS)

    def close(self) -> None:
        """Departs at exit, not in a forked child: tells all peers, and reads messages until they have departed too."""
        if os.getpid() != self._process or self._closing:
            return
        self._closing = True
        self._alarm.set()
        if self._thread is not None:
            self._thread.join()
        for driven in [driven for driven in self._driven if not driven.lingers]:
            self._driven.remove(driven)
            driven.abandon(None)
        self.drain()
        raised = getattr(sys, "last_value", None)
        self.leave("it exited" if raised is None else errors.describe(raised))

    def leave(self, why: str, timeout: float | None = None) -> list[int]:
        """Departs from all peers of all communicators, which end with that: see `depart`."""
        listeners = self._listened_to()
        missing = depart(listeners, why, timeout)
        for listener in listeners:
            self.forget(listener)
        return missing

    def _live(self) -> None:
        while not self._closing:
            if self._driven:
                self._advance_all()
                self._alarm.wait(self._nap())
            else:
                self._look_around([])
                self._alarm.wait(LISTEN_SECONDS)

    def _nap(self) -> float:
        """Length of a nap, in proportion to how long nothing has come: each poll takes time from computing threads."""
        last = max((driven.progressed for driven in list(self._driven)), default=0.0)
        return min(max((time.monotonic() - last) / 8, BUSY_SECONDS), IDLE_SECONDS)

    def _advance_all(self) -> None:
        for driven in list(self._driven):
            self._guard(driven, driven.advance)
        self._look_around(list(self._driven))

    def _guard(self, driven: Driven, look: Callable[[], bool | None]) -> None:
        """Abandons work that raises, and leaves the others and the thread alone."""
        try:
            over = look()
        except Exception as error:
            over = True
            driven.abandon(error)
        if over and driven in self._driven:
            self._driven.remove(driven)

    def _look_around(self, driven: Sequence[Driven]) -> None:
        """Looks at clocks; at most every LISTEN_SECONDS, a hundredth of the shortest watch, reads control messages."""
        for one in driven:
            self._guard(one, one.watch)
        now = time.monotonic()
        if now - self._listened < LISTEN_SECONDS or not (self.inline or self.on_thread()):
            return
        self._listened = now
        for listener in self._listened_to():
            _guarded(listener, listener.listen)

    def _listened_to(self) -> list[ControlListener]:
        with self._lock:
            return list(self._listeners)

    def on_thread(self) -> bool:
        """Whether the caller runs in the engine's thread, which must not wait for itself."""
        return threading.current_thread() is self._thread


def leave(*, timeout: float = FAILED_DEPARTURE_SECONDS) -> list[int]:
    """Departs from all peers of this process's communicators.

    Meant for the end of a program that has failed: nothing can be called over those communicators afterwards. Under MPI
    the end of a process waits in MPI_Finalize for all others, even for those that cannot be reached: where ranks are
    missing, MPI.COMM_WORLD.Abort(1) is the way out.

    Args:
        timeout: Seconds to wait for the peers.

    Returns:
        The ranks that did not depart in time.
    """
    return engine().leave("it ended after an error", timeout)


def depart(listeners: Sequence[ControlListener], why: str, timeout: float | None = None) -> list[int]:
    """Departs from all listeners' peers, then reads control messages until they have departed too.

    An arbiter may still be needed. Returns the ranks that have not departed after `timeout` seconds, default each
    listener's own limit.
    """
    for listener in listeners:
        _guarded(listener, partial(listener.depart, why))
    begin = time.monotonic()
    awaited = list(listeners)
    while awaited:
        awaited = [listener for listener in awaited if _guarded(listener, listener.listen)]
        waited = time.monotonic() - begin
        limits = [listener.departure_seconds() if timeout is None else timeout for listener in awaited]
        awaited = [
            listener for listener, limit in zip(awaited, limits, strict=True) if waited < limit and listener.awaited()
        ]
        time.sleep(0.005 if awaited else 0.0)
    missing = {rank for listener in listeners for rank in listener.missing()}
    for listener in listeners:
        _guarded(listener, listener.release)
    return sorted(missing)


def _guarded(listener: ControlListener, look: Callable[[], None]) -> bool:
    """Looks at one listener; an error of its transport (False) fails that communicator, and the engine goes on."""
    try:
        look()
        return True
    except Exception as error:
        listener.fail(error)
        return False
