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
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from queue import Empty, SimpleQueue

from communicators import errors
from communicators.background.control import FAILED_DEPARTURE_SECONDS, Control, depart
from communicators.labels import labelled

LISTEN_SECONDS = 0.05
BUSY_SECONDS = 50e-6
SPIN_SECONDS = 100e-6
IDLE_SECONDS = 1e-3
WOKEN_SECONDS = 10e-3
"""Longest nap where messages end it: for the clock alone."""

logger = logging.getLogger(__name__)


class Driven(ABC):
    """Work that progresses when it is advanced, by the engine or by the thread that waits for it, never by both.

    progressed: time of its last progress, by time.monotonic(): the longer ago, the more rarely it is advanced.
    lingers: whether its owner has gone on without it. Then it is driven to its end before the process ends.
    woken: whether the engine is told of all that it waits for but the clock (`Engine.notice`), so that none polls.
    """

    progressed: float
    lingers = False

    @property
    def woken(self) -> bool:
        return False

    @abstractmethod
    def advance(self) -> bool:
        """Progresses as far as it can without blocking; True once it is over, after which it is not advanced again."""

    def watch(self) -> None:  # noqa: B027 - most have no clock
        """Looks at the clock; called every few milliseconds while nothing advances."""

    def abandon(self, error: BaseException | None) -> None:  # noqa: B027
        """Releases work that is not advanced again. error: what it raised itself, None where the process ends."""


@cache
def engine() -> Engine:
    """The engine of this process, made at its first use."""
    made = Engine()
    atexit.register(made.close)
    return made


os.register_at_fork(after_in_child=engine.cache_clear)  # communicators that the child makes have one of its own


class Engine:
    """Drives started work in the background, and reads the control messages of communicators."""

    def __init__(self) -> None:
        self._driven: list[Driven] = []
        self._listeners: weakref.WeakSet[Control] = weakref.WeakSet()
        self._lock = threading.Lock()  # of the set, which grows in one thread while another walks it
        self._news: SimpleQueue[None] = SimpleQueue()  # an Event takes more of the core, 1,000 times a second
        self.wake = partial(self._news.put, None)  # ends a nap at once, because work that is driven has news
        self._closing = False
        self._process = os.getpid()
        self.inline = False
        self._listened = 0.0
        self._thread: threading.Thread | None = None

    @property
    def drives(self) -> bool:
        """Whether added work progresses while its owner computes."""
        return not self.inline and not self._closing

    def listen_to(self, control: Control) -> None:
        """Reads these control messages from now on."""
        with self._lock:
            self._listeners.add(control)
        if not control.transport.threaded:
            if not self.inline:
                logger.warning(
                    "%s has threaded=False, as with an MPI without THREAD_MULTIPLE: progress only inside our calls",
                    type(control.transport).__name__,
                )
            self.inline = True
        elif self._thread is None and not self.inline:
            self._thread = threading.Thread(target=self._live, name="communicators-engine", daemon=True)
            self._thread.start()

    def forget(self, control: Control) -> None:
        """Stops reading these control messages."""
        with self._lock:
            self._listeners.discard(control)

    def add(self, driven: Driven) -> None:
        """Drives work in the background, from now on."""
        self._driven.append(driven)
        if self._thread is not None:
            self.wake()

    def notice(self) -> None:
        """Ends a nap because a message has come that driven work may wait for; called in any thread."""
        if self._driven and self._thread is not None:
            self.wake()

    def drive(self, driven: Driven, nap: Callable[[float], None]) -> None:
        """Polls work to its end in the calling thread.

        Once it has spun for a while in a round it naps, in proportion to the wait: where ranks outnumber cores, it
        would otherwise spin in the way of the one that it waits for.
        """
        with labelled("wait"):
            while not driven.advance():
                if self.inline:  # what was started before has no other thread
                    self._advance_all()
                if (waited := time.monotonic() - driven.progressed) > SPIN_SECONDS:
                    nap(waited / 8)
                    driven.watch()
                    self._listen_in_time()

    def drive_until(self, over: Callable[[], bool], timeout: float | None) -> None:
        """Drives all work in the calling thread, where no other may, until this is over, or time is."""
        end = None if timeout is None else time.monotonic() + timeout
        self._advance_all()
        while not over() and (end is None or time.monotonic() < end):
            time.sleep(BUSY_SECONDS)
            self._advance_all()

    def busy(self, kind: Callable[[Driven], bool]) -> bool:
        """Whether work of this kind lingers."""
        return any(driven.lingers and kind(driven) for driven in list(self._driven))

    def drain(self, kind: Callable[[Driven], bool] = lambda _: True) -> None:
        """Waits until no work of this kind lingers, in the calling thread where the engine's has ended."""
        while self.busy(kind):
            if not self.drives:
                self._advance_all()
                self._listen()
            time.sleep(BUSY_SECONDS)

    def close(self) -> None:
        """Departs at exit, not in a forked child: tells all peers, and reads messages until they have departed too."""
        if os.getpid() != self._process or self._closing:
            return
        self._closing = True
        self.wake()
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
        controls = self._listened_to()
        missing = depart(controls, why, timeout)
        for control in controls:
            self.forget(control)
        return missing

    def check_process(self) -> None:
        """RuntimeError in a forked child, which lacks the engine's thread, and whose parent reads the messages."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this communicator was made before fork(), and belongs to the parent process: make a process group in "
                "the child, or start it by spawn or forkserver"
            )

    def check_wait(self) -> None:
        """RuntimeError where the engine's thread would wait for work that it drives itself."""
        self.check_process()
        if self.on_thread():
            raise RuntimeError(
                "wait() in a callback, such as a future's then(), would wait for itself, since the thread that calls "
                "it drives all calls: start the call there, and wait for it outside"
            )

    def on_thread(self) -> bool:
        """Whether the caller runs in the engine's thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def _live(self) -> None:
        while not self._closing:
            self._advance_all()
            nap = LISTEN_SECONDS
            if driven := list(self._driven):
                nap = WOKEN_SECONDS
                if not all(one.woken for one in driven):  # each poll takes time from computing threads
                    waited = time.monotonic() - max(one.progressed for one in driven)
                    nap = min(max(waited / 8, BUSY_SECONDS), IDLE_SECONDS)
            try:  # not by `suppress`, which takes a fifth more of the core
                self._news.get(timeout=nap)
                while True:  # news of one thing or of many end one nap
                    self._news.get_nowait()
            except Empty:
                pass

    def _advance_all(self) -> None:
        """Advances all work; what raises is abandoned, and leaves the others and the thread alone."""
        for driven in list(self._driven):
            try:
                over = driven.advance()
                if not over:
                    driven.watch()
            except Exception as error:
                over = True
                driven.abandon(error)
            if over and driven in self._driven:
                self._driven.remove(driven)
        self._listen_in_time()

    def _listen_in_time(self) -> None:
        """Reads control messages at most every LISTEN_SECONDS, a hundredth of the shortest watch."""
        now = time.monotonic()
        if now - self._listened >= LISTEN_SECONDS and (self.inline or self.on_thread()):
            self._listened = now
            self._listen()

    def _listen(self) -> None:
        for control in self._listened_to():
            control.listen()

    def _listened_to(self) -> list[Control]:
        with self._lock:
            return list(self._listeners)


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
