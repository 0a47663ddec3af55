"""Threads that block in a work's wait(), because gloo's `is_completed()` turns true in there only."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

WAIT = timedelta(days=1)  # the engine watches the clock; a wait that times out closes the connection for good
GIVE_UP = timedelta(milliseconds=1)


class Waitable(Protocol):
    """A work of torch.distributed."""

    def wait(self, timeout: timedelta) -> bool:
        """Blocks until the message is sent or received."""


class Wait:
    """One message in flight: `done`, with an `error` if it failed.

    Its error names no frames: they would keep its caller alive, and so the group with its threads and connections.
    """

    def __init__(self, work: Waitable | None, news: threading.Event, error: BaseException | None = None) -> None:
        self._work = work  # none once it is done: see `Waiters.close`
        self.done = work is None
        self._news = news
        self.error = error

    def block(self) -> None:
        """Blocks until the message is done; called in a waiter thread."""
        assert self._work is not None
        try:
            self._work.wait(WAIT)
        except Exception as error:
            self.error = error.with_traceback(None)
        self._work = None
        self.done = True
        self._news.set()

    def give_up(self) -> None:
        """Ends a wait that goes on in another thread, by closing its connection."""
        if (work := self._work) is not None:
            try:
                work.wait(GIVE_UP)
            except Exception as error:
                self.error = error.with_traceback(None)


class Waiters:
    """Threads that wait, as many as there are messages in flight at a time; idle ones are used again.

    news: set whenever one of them is done.
    """

    def __init__(self) -> None:
        self.news = threading.Event()
        self._queue: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def posted(self, post: Callable[[], Waitable]) -> Wait:
        """Posts a message and starts to wait; one that cannot be posted has failed."""
        try:
            return self.wait_for(post())
        except RuntimeError as error:
            self.news.set()
            return Wait(None, self.news, error.with_traceback(None))

    def wait_for(self, work: Waitable) -> Wait:
        """Starts to wait for a work."""
        wait = Wait(work, self.news)
        with self._lock:
            self._busy += 1
            if self._busy > len(self._threads):
                thread = threading.Thread(target=self._live, name="communicators-waiter", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(wait)
        return wait

    def close(self, timeout: float) -> None:
        """Ends the idle threads, and waits for them at most `timeout` seconds in all.

        A thread that is inside torch when the interpreter ends, in a wait or freeing a work, aborts the process.
        """
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():  # a finalizer runs wherever the last reference goes
                thread.join(max(0.0, end - time.monotonic()))

    def _live(self) -> None:
        while (wait := self._queue.get()) is not None:
            wait.block()
            del wait
            with self._lock:
                self._busy -= 1
