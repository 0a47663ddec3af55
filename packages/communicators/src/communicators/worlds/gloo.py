"""Short messages by gloo, beside the data: a receive from every peer is always posted, and tells when one is gone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo, Store

from communicators.background.transport import PeerLost, SignalLine


class GlooGroup:
    """Group of gloo that ends at `close`; what is posted afterwards raises RuntimeError, as where a connection is gone.

    Each has three threads and a connection to every peer. It is not made by dist.new_group, whose names count a rank's
    groups, so that ranks which are in other groups would never meet.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._made: Any = ProcessGroupGloo(store, rank, size, WAIT)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable:
        """Posts a message."""
        work: Waitable = self._open().send(tensors, peer, tag)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Waitable:
        """Posts room for a message."""
        work: Waitable = self._open().recv(tensors, peer, tag)
        return work

    def allreduce(self, tensors: list[Tensor]) -> Waitable:
        """Starts a sum, which outlives `close`."""
        made = self._open()
        return _Sum(made.allreduce(tensors, AllreduceOptions()).wait, made)

    def close(self) -> None:
        """Lets go of torch's group, and of its threads and connections once no sum is under way."""
        self._made = None

    def _open(self) -> Any:
        made = self._made  # read once: another thread may close it
        if made is None:
            raise RuntimeError("this communicator is closed")
        return made


class _Sum:
    """Sum under way, which keeps its group: the group's end would wait for it while Python stands still."""

    def __init__(self, wait: Callable[[timedelta], bool], group: Any) -> None:
        self.wait, self._group = wait, group


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


LENGTH_BYTES = 4
FLUSH_POLL_SECONDS = 1e-3


class Mailbox:
    """Mailbox of one rank. Each receive has a waiter's thread; gloo's receive from anybody could not be ended.

    tag: of all messages. nbytes: the most that one holds. A message is on its way until its receiver has posted room
    for it.
    """

    def __init__(self, data: GlooGroup, rank: int, size: int, waiters: Waiters, *, tag: int, nbytes: int) -> None:
        self._data, self._waiters, self._tag, self._nbytes = data, waiters, tag, nbytes
        self._written: list[Wait] = []
        self._coming = {peer: self._post(peer) for peer in range(size) if peer != rank}

    def write(self, peer: int, message: bytes) -> Wait:
        """Sends a message; does not block."""
        framed = torch.frombuffer(bytearray(len(message).to_bytes(LENGTH_BYTES, "little") + message), dtype=torch.uint8)
        wait = self._waiters.posted(lambda: self._data.send([framed], peer, self._tag))
        self._written = [*(written for written in self._written if not written.done), wait]
        return wait

    def read(self) -> list[tuple[int, bytes]]:
        """The messages that have come, by source; does not block."""
        messages = []
        for peer, (room, wait) in list(self._coming.items()):
            if wait.done and wait.error is None:
                messages.append((peer, _message(room)))
                self._coming[peer] = self._post(peer)
        return messages

    def lost(self) -> PeerLost | None:
        """A peer whose connection is gone."""
        errors = ((peer, wait.error) for peer, (_, wait) in self._coming.items())
        return next((PeerLost(peer, error) for peer, error in errors if error is not None), None)

    def unreachable(self) -> list[int]:
        """Peers whose connection is gone."""
        return [peer for peer, (_, wait) in self._coming.items() if wait.error is not None]

    def flush(self, seconds: float) -> None:
        """Waits at most `seconds` for the messages that were written to be on their way."""
        end = time.monotonic() + seconds
        while not all(wait.done for wait in self._written) and time.monotonic() < end:
            time.sleep(FLUSH_POLL_SECONDS)

    def open(self) -> list[Wait]:
        """Messages in flight, sent and received."""
        return [*(wait for _, wait in self._coming.values()), *self._written]

    def close(self) -> None:
        """Ends all receives, with their connections."""
        for wait in self.open():
            wait.give_up()

    def _post(self, peer: int) -> tuple[Tensor, Wait]:
        room = torch.zeros(LENGTH_BYTES + self._nbytes, dtype=torch.uint8)
        return room, self._waiters.posted(lambda: self._data.recv([room], peer, self._tag))


class GlooSignalLine(SignalLine):
    """Signal line over a mailbox of its own.

    abandon: takes what is still in flight at the end, because ending it closes connections.
    """

    def __init__(self, mailbox: Mailbox, abandon: Callable[[list[Wait]], None]) -> None:
        self._mailbox, self._abandon = mailbox, abandon
        self._sending: dict[int, Wait] = {}

    def send(self, peer: int, message: bytes) -> None:
        self._sending[peer] = self._mailbox.write(peer, message)

    def sent(self, peer: int) -> bool:
        wait = self._sending.get(peer)
        if wait is not None and wait.error is not None:
            raise PeerLost(peer, wait.error)
        return wait is None or wait.done

    def received(self) -> list[tuple[int, bytes]]:
        return self._mailbox.read()

    def close(self) -> None:
        self._abandon(self._mailbox.open())


def _message(room: Tensor) -> bytes:
    """Message in a buffer. Its length is not trusted: a message that is cut does not pass its check."""
    memory = room.numpy().tobytes()
    return memory[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")]
