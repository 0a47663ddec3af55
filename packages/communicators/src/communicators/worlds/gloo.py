"""torch.distributed by point-to-point, on a gloo group of our own; control messages travel there too.

gloo's `is_completed()` turns true only inside `wait()`, so threads block there (`Waiters`). Short messages beside the
data have a receive always posted from every peer, which tells when one is gone (`Mailbox`).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo, Store

from communicators.background.call import TAG_BITS, Call
from communicators.background.control import CONTROL_BYTES
from communicators.background.transport import (
    SIGNAL_BYTES,
    PeerLost,
    Pending,
    PendingSum,
    SignalLine,
    Transport,
)
from communicators.communicator import TIMEOUT_SECONDS
from communicators.schedule import Payload, Received, Round
from communicators.worlds.meeting import Rendezvous, in_time

WAIT = timedelta(days=1)  # the engine watches the clock; a wait that times out closes the connection for good
GIVE_UP = timedelta(milliseconds=1)


LENGTH_BYTES = 4
FLUSH_POLL_SECONDS = 1e-3
CLOSE_SECONDS = 1.0
"""Longest time that the control messages of a closed communicator may take to be sent."""
LOST_SECONDS = 1.0
"""Longest time after a failure of gloo's own sum to find out whose connection was lost."""
CONTROL_TAG = 1 << TAG_BITS
SIGNAL_TAG = CONTROL_TAG + 1
_SUMMED = {torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8}


class GlooTransport(Transport):
    """A gloo group of our own, for payloads and for control messages."""

    threaded = outlives_ranks = True
    departure_seconds = 2.0  # nothing of gloo waits for anybody at the end

    def __init__(self, rendezvous: Rendezvous, patience: float = TIMEOUT_SECONDS) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.device = torch.device("cpu")
        self.rendezvous = rendezvous.met(patience)
        self._data = GlooGroup(self.rendezvous.shared, self.rank, self.size)
        self.rendezvous.met(patience)  # to a rank that closes at once, others could be connecting yet
        self._waiters = Waiters()
        self._control = self._mailbox(CONTROL_TAG, CONTROL_BYTES)
        self._abandoned: list[Wait] = []
        ending = (self._data, self._waiters, self._control, self._abandoned)
        self._end = weakref.finalize(self, _end, *ending, timeout=1.0)  # without close(): of a destroyed group
        self._end.atexit = False

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        pinned = device.type == "cuda"
        buffers = {peer: Payload.on_host(nbytes, pinned=pinned) for peer, nbytes in action.recvs.items()}
        receives = {peer: self._receive(buffer, peer, call.incoming_tag(peer)) for peer, buffer in buffers.items()}
        sends = {peer: self._send(call, payload.to_host(), peer) for peer, payload in action.sends.items()}
        return _PendingRound(self, call, receives, sends, buffers, device)

    def duplicate(self, patience: float) -> GlooTransport:
        self.duplicates += 1
        there = self.rendezvous.elsewhere(f"duplicate/{self.duplicates}")
        return in_time(lambda: GlooTransport(there, patience), self.rank, patience)

    def can_sum(self, tensor: Tensor) -> bool:
        """Whether gloo can sum this tensor: on the CPU, of a dtype that it knows."""
        return tensor.device.type == "cpu" and tensor.dtype in _SUMMED

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts gloo's own sum, which aborts the process if ranks' sizes differ: they have agreed on them here."""
        return _PendingSum(self._waiters.wait_for(self._data.allreduce([tensor])), self)

    def nap(self, seconds: float) -> None:
        """Waits at most `seconds` for a waiter to have news."""
        self._waiters.news.wait(seconds)
        self._waiters.news.clear()

    def send_control(self, peer: int, message: bytes) -> None:
        self._control.write(peer, message)

    def read_control(self) -> list[bytes]:
        return [message for _, message in self._control.read()]

    def unreachable(self) -> list[int]:
        return self._control.unreachable()

    def lost(self) -> PeerLost | None:
        return self._control.lost()

    def close(self) -> None:
        self._control.flush(CLOSE_SECONDS)
        self._end()

    def abandon(self, waits: list[Wait]) -> None:
        """Keeps waits that nobody asks for any more. Giving them up would end connections of control messages."""
        self._abandoned += [wait for wait in waits if not wait.done]

    def signal_line(self) -> GlooSignalLine:
        return GlooSignalLine(self._mailbox(SIGNAL_TAG, SIGNAL_BYTES), self.abandon)

    def _mailbox(self, tag: int, nbytes: int) -> Mailbox:
        return Mailbox(self._data, self.rank, self.size, self._waiters, tag=tag, nbytes=nbytes)

    def _send(self, call: Call, payload: Payload, peer: int) -> Wait:
        call.stamp(payload)
        tag = call.outgoing_tag(peer)
        return self._waiters.posted(lambda: self._data.group.send([payload.memory], peer, tag))

    def _receive(self, buffer: Payload, peer: int, tag: int) -> Wait:
        return self._waiters.posted(lambda: self._data.group.recv([buffer.memory], peer, tag))


class _PendingRound(Pending):
    def __init__(
        self,
        transport: GlooTransport,
        call: Call,
        receives: dict[int, Wait],
        sends: dict[int, Wait],
        buffers: dict[int, Payload],
        device: torch.device,
    ) -> None:
        self._transport, self._call, self._buffers, self._device = transport, call, buffers, device
        self._receives, self._waits = receives, [*receives.items(), *sends.items()]

    def arrived(self) -> bool:
        self._raise_lost()
        return all(wait.done for wait in self._receives.values())

    def done(self) -> bool:
        self._raise_lost()
        return all(wait.done for _, wait in self._waits)

    def _raise_lost(self) -> None:
        for peer, wait in self._waits:
            if wait.error is not None:
                raise PeerLost(peer, wait.error)

    def received(self) -> Received:
        received = {}
        for peer, buffer in self._buffers.items():
            payload = self._call.cut(buffer)  # gloo does not say how much has come
            self._call.accept(peer, payload, buffer.nbytes)
            received[peer] = payload if self._device.type == "cpu" else Payload(payload.memory.to(self._device))
        return received

    def missing(self) -> list[int]:
        return sorted({peer for peer, wait in self._waits if not wait.done or wait.error is not None})

    def cancel(self) -> None:
        self._transport.abandon([wait for _, wait in self._waits])


class _PendingSum(PendingSum):
    def __init__(self, wait: Wait, transport: GlooTransport) -> None:
        super().__init__(transport)
        self._wait, self._group, self._failed = wait, transport, 0.0

    def done(self) -> bool:
        if self._wait.error is None:
            return self._wait.done
        if (lost := self._group.lost()) is not None:  # gloo does not say which rank it was
            raise lost
        self._failed = self._failed or time.monotonic()
        if time.monotonic() - self._failed > LOST_SECONDS:
            raise self._wait.error
        return False

    def cancel(self) -> None:
        self._group.abandon([self._wait])


def _end(data: GlooGroup, waiters: Waiters, control: Mailbox, abandoned: list[Wait], timeout: float) -> None:
    """Lets the threads go, then the group: a thread that still waits when the interpreter ends would abort it."""
    control.close()
    for wait in abandoned:
        wait.give_up()
    waiters.close(timeout)
    data.close()


class GlooGroup:
    """Group of gloo that ends at `close`; what is posted afterwards raises RuntimeError, as where a connection is gone.

    Each has three threads and a connection to every peer. It is not made by dist.new_group, whose names count a rank's
    groups, so that ranks which are in other groups would never meet.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._made: Any = ProcessGroupGloo(store, rank, size, WAIT)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Starts a sum, which outlives `close`."""
        made = self.group
        return _Sum(made.allreduce(tensors, AllreduceOptions()).wait, made)

    def close(self) -> None:
        """Lets go of torch's group, and of its threads and connections once no sum is under way."""
        self._made = None

    @property
    def group(self) -> Any:
        """Torch's group, while it is open."""
        made = self._made  # read once: another thread may close it
        if made is None:
            raise RuntimeError("this communicator is closed")
        return made


class _Sum:
    """Sum under way, which keeps its group: the group's end would wait for it while Python stands still."""

    def __init__(self, wait: Callable[[timedelta], bool], group: Any) -> None:
        self.wait, self._group = wait, group


class Wait:
    """One message in flight: `done`, with an `error` if it failed.

    Its error names no frames: they would keep its caller alive, and so the group with its threads and connections.
    """

    def __init__(self, work: Any, news: threading.Event, error: BaseException | None = None) -> None:
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

    def posted(self, post: Callable[[], Any]) -> Wait:
        """Posts a message and starts to wait; one that cannot be posted has failed."""
        try:
            return self.wait_for(post())
        except RuntimeError as error:
            self.news.set()
            return Wait(None, self.news, error.with_traceback(None))

    def wait_for(self, work: Any) -> Wait:
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
        wait = self._waiters.posted(lambda: self._data.group.send([framed], peer, self._tag))
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
        return room, self._waiters.posted(lambda: self._data.group.recv([room], peer, self._tag))


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
