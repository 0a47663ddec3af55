"""gloo group of our own, and the threads that wait for its messages: `is_completed()` turns true only in `wait()`."""

from __future__ import annotations

import itertools
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store

from communicators.background.call import TAG_BITS
from communicators.background.engine import engine
from communicators.errors import CollectiveError
from communicators.labels import unseen
from communicators.worlds.meeting import begun, reconnected

WAIT = timedelta(days=3650)
"""Longer than any training: a wait that times out closes all connections, and the engine watches the clock anyway."""
GIVE_UP = timedelta(milliseconds=1)
PIECE_BYTES = 1 << 16
"""Fewest bytes of a long message that go by one of several connections."""
CONTROL_TAG = 1 << TAG_BITS
SIGNAL_TAG, END_TAG, EAGER_TAG = CONTROL_TAG + 1, CONTROL_TAG + 2, CONTROL_TAG + 3
UNCONNECTED = (
    "cannot connect to all others, which are there: open all ports between the hosts, and name the interface that "
    "joins them in GLOO_SOCKET_IFNAME (`ip addr` lists them, `thinwire doctor` tries it)"
)


@dataclass(eq=False)
class Wait:
    """One message in flight: `done` at a time, with an `error` if it failed. work, keeps: let go once it is done.

    then: called by the thread that waited, which goes on with the wait that it returns. Its error names no frames: they
    would keep its caller alive, and so the group with its threads and connections.
    """

    work: Any
    done: bool = False
    error: BaseException | None = None
    keeps: Any = None
    then: Callable[[], Wait | None] = lambda: None
    ended = math.inf


class Waiters:
    """Threads that wait, as many as there are messages in flight at a time; idle ones are used again.

    news: set whenever one of them is done.
    """

    def __init__(self) -> None:
        self.news, self._engine = threading.Event(), engine()
        self._queue: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def begin(self, wait: Wait) -> Wait:
        """Starts a wait in one of the threads."""
        with self._lock:
            self._busy += 1
            if self._busy > len(self._threads):
                thread = threading.Thread(target=self._live, name="communicators-waiter", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(wait)
        return wait

    def tell(self) -> None:
        """Ends the naps of a caller and of the engine."""
        self.news.set()
        self._engine.notice()

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
            while wait is not None:
                try:
                    wait.work.wait(WAIT)
                except Exception as error:
                    wait.error = error.with_traceback(None)
                wait.work = wait.keeps = None
                wait.done, wait.ended = True, time.monotonic()
                wait = wait.then()
                self.tell()
            with self._lock:
                self._busy -= 1


class GlooGroup:
    """Group of gloo that ends at `close`, with the threads that wait for its messages.

    Each has three threads of gloo's and a connection to every peer, and as many again for each further one of several
    connections. It is not made by dist.new_group, whose names count a rank's groups, so that ranks which are in other
    groups would never meet.
    """

    def __init__(self, store: Store, rank: int, size: int, connections: int = 1) -> None:
        self.others = [peer for peer in range(size) if peer != rank]
        self.waiters = Waiters()

        def another(number: int) -> Any:
            return _connected(reconnected(PrefixStore(f"connection/{number}", store)), rank, size)

        more = [begun(partial(another, number)) for number in range(1, connections)]  # at once: a path may be long
        self._made: list[Any] = [_connected(store, rank, size), *(one.result() for one in more)]

    def post(self, what: str, memory: Tensor, peer: int, tag: int, *, spread: bool = False) -> Wait:
        """Posts a message, by "send" or "recv"; one of a group that is closed, or cannot be posted, has failed.

        spread: whether a long one goes by several connections; of the same length on both sides then.
        """
        try:
            return self.waiters.begin(Wait(self.work(what, memory, peer, tag, spread=spread)))
        except RuntimeError as error:
            self.waiters.tell()
            return Wait(None, done=True, error=error.with_traceback(None))

    def work(self, what: str, memory: Tensor, peer: int, tag: int, *, spread: bool = False) -> Any:
        """A message as `post` posts it, for which nobody waits yet. Raises RuntimeError where that cannot be posted."""
        made = self._made  # read once: another thread may close it
        if not made:
            raise RuntimeError("this communicator is closed")
        count = max(1, min(len(made), memory.numel() // PIECE_BYTES)) if spread else 1
        pieces = zip(made, memory.tensor_split(count), strict=False)
        works = unseen(lambda: [getattr(by, what)([piece], peer, tag) for by, piece in pieces])
        return works[0] if count == 1 else _Works(works)

    def sum(self, tensor: Tensor) -> Wait:
        """Starts a sum, which keeps the group: the group's end would wait for it while Python stands still."""
        made = self._made
        if not made:
            raise RuntimeError("this communicator is closed")
        work = unseen(lambda: made[0].allreduce([tensor], AllreduceOptions()))
        return self.waiters.begin(Wait(work, keeps=made))

    def end(self, timeout: float) -> None:
        """Ends what is in flight, then the threads, then the group: a thread that waits at exit aborts the process.

        A wait that is in vain closes all connections, and so ends all others. It is one for a message that nobody
        sends: who waits for another's message may take it, and that one waits for ever. A send that gloo had begun to
        write it forgets instead (2.13 and before): the thread of that one stays behind.
        """
        made, self._made = self._made, []
        for by, peer in itertools.product(made, self.others):
            with suppress(RuntimeError):  # for each of them, as one whose peer is gone closes no other
                by.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, END_TAG).wait(GIVE_UP)
        self.waiters.close(timeout)


@dataclass
class _Works:
    """Pieces of one message, by a connection each."""

    works: list[Any]

    def wait(self, timeout: timedelta) -> None:
        for work in self.works:
            work.wait(timeout)


def _connected(store: Store, rank: int, size: int) -> Any:
    """A connection to every other rank."""
    try:
        return ProcessGroupGloo(store, rank, size, WAIT)
    except RuntimeError as error:
        if "Unable to find address for" in str(error):
            raise _no_interface() from error
        if "connectFullMesh" in str(error):
            raise CollectiveError(f"rank {rank} {UNCONNECTED}") from error
        raise


def _no_interface() -> RuntimeError:
    wanted, there = os.environ.get("GLOO_SOCKET_IFNAME"), ", ".join(name for _, name in socket.if_nameindex())
    return RuntimeError(
        f"GLOO_SOCKET_IFNAME is {wanted!r}, which is no interface with an address on this host: name one of {there} "
        "that joins the hosts, or leave it out"
    )
