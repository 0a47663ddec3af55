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
"""So long the end of a process waits for the peers of a communicator that has failed."""

logger = logging.getLogger(__name__)


class Driven(Protocol):
    """Something that goes on by being looked at, by the engine or by who waits for it; never by both.

    progressed: when it last got on, by time.monotonic(): the longer ago, the rarer it is looked at.
    lingers: whether its owner has gone on without it. Then it is seen to its end before the process ends.
    """

    progressed: float
    lingers: bool

    def poll(self) -> bool:
        """Goes on as far as it can without blocking; True once it is over, then it is not looked at again."""

    def watch(self) -> None:
        """Looks at the clock; called every few milliseconds while polls find nothing."""

    def abandon(self, error: BaseException | None) -> None:
        """It is not looked at again: what it raised itself, None where the process ends."""


class ControlListener(Protocol):
    """A communicator whose control messages are read.

    threaded: whether another thread may do that while its owner computes.
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
        """How long their departure is waited for."""

    def release(self) -> None:
        """Lets go of the transport."""

    def fail(self, error: BaseException) -> None:
        """The transport itself has failed here."""


@cache
def engine() -> Engine:
    """The engine of this process, made at its first use."""
    made = Engine()
    atexit.register(made.close)
    return made


class Alarm:
    """What a thread naps by; a lock, because an Event costs twice as much of the core, a thousand times a second."""

    def __init__(self) -> None:
        self._ringing = threading.Lock()
        self._ringing.acquire()

    def set(self) -> None:
        """Ends the nap, or the next one if nobody naps."""
        with suppress(RuntimeError):  # it rings already
            self._ringing.release()

    def wait(self, seconds: float) -> None:
        """Naps at most so long."""
        self._ringing.acquire(timeout=seconds)


class Ending:
    """An Event that is cheaper: every call has one, and hardly any is waited for."""

    def __init__(self) -> None:
        self._before = threading.Lock()
        self._before.acquire()
        self._set = False

    def is_set(self) -> bool:
        """Whether it has come."""
        return self._set

    def set(self) -> None:
        """It has come; by one thread at a time."""
        if not self._set:
            self._set = True
            self._before.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has come, or for so many seconds; whether it has."""
        if self._set:
            return True
        if self._before.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            self._before.release()  # for the next one who waits
        return self._set


class Engine:
    """What is driven in the background, and the communicators whose control messages are read."""

    def __init__(self) -> None:
        self._driven: list[Driven] = []
        self._listeners: weakref.WeakSet[ControlListener] = weakref.WeakSet()
        self._lock = threading.Lock()  # of the set, which grows in one thread while another walks it
        self._wake = Alarm()
        self._closing = False
        self._process = os.getpid()
        self.inline = False
        self._listened = 0.0
        self._thread: threading.Thread | None = None

    @property
    def drives(self) -> bool:
        """Whether what is added goes on while its owner computes."""
        return not self.inline and not self._closing

    def listen_to(self, listener: ControlListener) -> None:
        """From now on its control messages are read."""
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
        """Its control messages are read no longer."""
        with self._lock:
            self._listeners.discard(listener)

    def add(self, driven: Driven) -> None:
        """Drives it in the background, at once."""
        self._driven.append(driven)
        self._wake.set()

    def wake(self) -> None:
        """Something that it drives has news: it is looked at now, not at the end of a nap."""
        self._wake.set()

    def drive(self, driven: Driven, nap: Callable[[float], None]) -> None:
        """Polls it to its end in the calling thread.

        Busy at first in every round, then with naps in proportion to the wait: ranks beyond the cores would otherwise
        spin in the way of the one that they wait for.
        """
        while not driven.poll():
            waited = time.monotonic() - driven.progressed
            if self.inline:  # what was started before has no other thread
                self._poll_all()
            if waited > SPIN_SECONDS:
                nap(min(waited / 8, LONGEST_NAP_SECONDS))
                self._look_around([driven])

    def wait(self, over: Callable[[], bool], finished: Ending | threading.Event, timeout: float | None) -> bool:
        """Waits for the end of what was added; False when it is not over in time."""
        if not self.inline:
            return finished.wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._poll_all()
        while not over() and (end is None or time.monotonic() < end):
            time.sleep(BUSY_SECONDS)
            self._poll_all()
        return over()

    def drain(self, kind: Callable[[Driven], bool] = lambda driven: True) -> None:
        """Until nothing of this kind that lingers is left; in the calling thread where the engine's has ended."""
        while any(driven.lingers and kind(driven) for driven in list(self._driven)):
            if not self.drives:
                self._poll_all()
                for listener in self._listened_to():
                    _guarded(listener, listener.listen)
            time.sleep(BUSY_SECONDS)

    def close(self) -> None:
        """At exit: tells all peers, and reads their messages until they have departed too. Not in a forked child."""
        if os.getpid() != self._process or self._closing:
            return
        self._closing = True
        self._wake.set()
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
                self._poll_all()
                self._wake.wait(self._nap())
            else:
                self._look_around([])
                self._wake.wait(LISTEN_SECONDS)

    def _nap(self) -> float:
        """In proportion to how long nothing has come: each look takes time from the threads that compute."""
        last = max((driven.progressed for driven in list(self._driven)), default=0.0)
        return min(max((time.monotonic() - last) / 8, BUSY_SECONDS), IDLE_SECONDS)

    def _poll_all(self) -> None:
        for driven in list(self._driven):
            self._guard(driven, driven.poll)
        self._look_around(list(self._driven))

    def _guard(self, driven: Driven, look: Callable[[], bool | None]) -> None:
        """What it raises ends it alone, and not the others, or the thread."""
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

    For the end of a program that has failed. Nothing can be called over those afterwards. Under MPI the end of a
    process waits in MPI_Finalize for all others, also for those that cannot be reached: where ranks are missing,
    MPI.COMM_WORLD.Abort(1) is the way out.

    Args:
        timeout: Seconds to wait for the peers.

    Returns:
        The ranks that did not depart in time.
    """
    return engine().leave("it ended after an error", timeout)


def depart(listeners: Sequence[ControlListener], why: str, timeout: float | None = None) -> list[int]:
    """Departs from all of them, then goes on reading control messages until all peers have said so too.

    An arbiter may still be needed. Returns the ranks that have not after `timeout` seconds, default what each says.
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
    """An error of the transport itself (False) is its communicator's; the others' engine goes on."""
    try:
        look()
        return True
    except Exception as error:
        listener.fail(error)
        return False
