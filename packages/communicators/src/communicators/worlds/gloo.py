"""torch.distributed by point-to-point, on a gloo group of our own; control messages travel there too.

gloo's `is_completed()` turns true only inside `wait()`, so threads block there (`Waiters`). Short messages beside the
data have a receive always posted from every peer, which tells when one is gone (`Mailbox`).
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store

from communicators.background.call import TAG_BITS, Call
from communicators.background.engine import engine
from communicators.background.transport import (
    CONTROL_BYTES,
    SIGNAL_BYTES,
    PeerLost,
    Pending,
    PendingSum,
    SignalLine,
    Transport,
)
from communicators.communicator import TIMEOUT_SECONDS
from communicators.errors import CollectiveError
from communicators.schedule import Payload, Received, Round
from communicators.worlds.meeting import STORE_SECONDS, Rendezvous, begun, in_time, reconnected

WAIT = timedelta(days=1)  # the engine watches the clock; a wait that times out closes the connection for good
GIVE_UP = timedelta(milliseconds=1)


LENGTH_BYTES = 4
PIECE_BYTES = 1 << 16
"""Fewest bytes of a long message that go by one of several connections."""
FLUSH_POLL_SECONDS = 1e-3
LONGEST_NAP_SECONDS = 2e-3
"""Where a message that comes ends it."""
CLOSE_SECONDS = 1.0
"""Longest time that the control messages of a closed communicator may take to be sent."""
LOST_SECONDS = 1.0
"""Longest time after a failure of gloo's own sum to find out whose connection was lost."""
UNCONNECTED = (
    "cannot connect to all others, which are there: open all ports between the hosts, and name the interface that "
    "joins them in GLOO_SOCKET_IFNAME (`ip addr` lists them, `thinwire doctor` tries it)"
)
CONTROL_TAG = 1 << TAG_BITS
SIGNAL_TAG, END_TAG = CONTROL_TAG + 1, CONTROL_TAG + 2


class GlooTransport(Transport):
    """A gloo group of our own, for payloads and for control messages."""

    threaded = outlives_ranks = notices = True
    summed: Collection[torch.dtype] = (
        *(torch.float32, torch.float64),
        *(torch.int8, torch.int32, torch.int64, torch.uint8),
    )
    departure_seconds = 2.0  # nothing of gloo waits for anybody at the end

    def __init__(self, rendezvous: Rendezvous, patience: float = TIMEOUT_SECONDS) -> None:
        self.rank, self.size, self.connections = rendezvous.rank, rendezvous.size, rendezvous.connections
        if self.connections > 1:
            self.summed = ()  # gloo's own sum goes by one
        self.device = torch.device("cpu")
        end = time.monotonic() + patience
        self.rendezvous = rendezvous.met(patience)
        self.group = self.rendezvous.name
        left = max(end - time.monotonic() - STORE_SECONDS / 2, STORE_SECONDS)  # before the caller gives up
        shared, rank, size, connections = self.rendezvous.shared, self.rank, self.size, self.connections
        self._data = in_time(lambda: GlooGroup(shared, rank, size, connections), rank, left, UNCONNECTED)
        self.rendezvous.met(patience)  # to a rank that closes at once, others could be connecting yet
        self._control = self._mailbox(CONTROL_TAG, CONTROL_BYTES)
        self._end = weakref.finalize(self, self._data.end, timeout=1.0)  # without close(): of a destroyed group
        self._end.atexit = False

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        pinned, spread = device.type == "cuda", not action.bounded  # whose receiver does not know the length
        buffers = {peer: Payload.on_host(nbytes, pinned=pinned) for peer, nbytes in action.recvs.items()}
        receives = {
            peer: self._data.post("recv", buffer.memory, peer, call.tag(peer, call.heard), spread=spread)
            for peer, buffer in buffers.items()
        }
        sends = []
        for peer, payload in action.sends.items():
            staged = payload.to_host()
            call.stamp(staged)
            wait = self._data.post("send", staged.memory, peer, call.tag(peer, call.sent), spread=spread)
            sends.append((peer, wait))
        return _PendingRound(call, device, buffers, receives, sends)

    def duplicate(self, patience: float) -> Transport:
        return self._another(GlooTransport, patience)

    def _another(self, make: Callable[[Rendezvous, float], GlooTransport], patience: float) -> GlooTransport:
        self.duplicates += 1
        there = self.rendezvous.elsewhere(f"duplicate/{self.duplicates}")
        return in_time(lambda: make(there, patience), self.rank, patience)

    def post_sum(self, tensor: Tensor) -> Pending:
        """Posts gloo's own sum, which aborts the process if ranks' sizes differ: they have agreed on them here."""
        wait = self._data.sum(tensor)
        return PendingSum(self, lambda: self._summed(wait), lambda: None)

    def _summed(self, wait: Wait) -> bool:
        """Whether a sum is over. Raises PeerLost; gloo does not say which rank it was, so that is found out."""
        if wait.error is None:
            return wait.done
        if (lost := self.lost()) is not None:
            raise lost
        if time.monotonic() - wait.ended > LOST_SECONDS:
            raise wait.error
        return False

    def nap(self, seconds: float) -> None:
        """Waits at most `seconds` for a waiter to have news, which another thread's nap may have taken."""
        self._data.waiters.news.wait(min(seconds, LONGEST_NAP_SECONDS))
        self._data.waiters.news.clear()

    def send_control(self, peer: int, message: bytes) -> None:
        self._control.send(peer, message)

    def read_control(self) -> list[bytes]:
        return [message for _, message in self._control.received()]

    def unreachable(self) -> list[int]:
        return [lost.peer for lost in self._control.lost()]

    def lost(self) -> PeerLost | None:
        return next(iter(self._control.lost()), None)

    def close(self) -> None:
        self._control.flush(CLOSE_SECONDS)
        self._end()

    def signal_line(self) -> Mailbox:
        return self._mailbox(SIGNAL_TAG, SIGNAL_BYTES)

    def _mailbox(self, tag: int, nbytes: int) -> Mailbox:
        return Mailbox(self._data, self.rank, self.size, tag=tag, nbytes=nbytes)


@dataclass(eq=False)
class _PendingRound(Pending):
    call: Call
    device: torch.device
    buffers: dict[int, Payload]
    receives: dict[int, Wait]
    sends: list[tuple[int, Wait]]

    def come(self) -> list[int]:
        return [peer for peer, wait in self.receives.items() if wait.done]

    def arrived(self) -> bool:
        for peer, wait in (*self.receives.items(), *self.sends):
            if wait.error is not None:
                raise PeerLost(peer, wait.error)
        return all(wait.done for wait in self.receives.values())

    def done(self) -> bool:
        return self.arrived() and all(wait.done for _, wait in self.sends)

    def received(self) -> Received:
        """Payloads; gloo does not say how much of each has come."""
        return {peer: self.call.take(peer, buffer, None, self.device) for peer, buffer in self.buffers.items()}

    def missing(self) -> list[int]:
        waits = (*self.receives.items(), *self.sends)
        return sorted({peer for peer, wait in waits if not wait.done or wait.error is not None})

    def cancel(self) -> None:
        """Leaves them to the group's end: to give one up would end connections of control messages."""


@dataclass(eq=False)
class Wait:
    """One message in flight: `done` at a time, with an `error` if it failed. work, keeps: let go once it is done.

    Its error names no frames: they would keep its caller alive, and so the group with its threads and connections.
    """

    work: Any
    done: bool = False
    error: BaseException | None = None
    keeps: Any = None
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

    def wait_for(self, work: Any, keeps: Any = None) -> Wait:
        """Starts to wait for a work of torch's. keeps: what must live until it is done."""
        wait = Wait(work, keeps=keeps)
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
            try:
                wait.work.wait(WAIT)
            except Exception as error:
                wait.error = error.with_traceback(None)
            wait.work = wait.keeps = None
            wait.done, wait.ended = True, time.monotonic()
            self.tell()
            del wait
            with self._lock:
                self._busy -= 1


class GlooGroup:
    """Group of gloo that ends at `close`, with the threads that wait for its messages.

    Each has three threads of gloo's and a connection to every peer, and as many again for each further one of several
    connections. It is not made by dist.new_group, whose names count a rank's groups, so that ranks which are in other
    groups would never meet.
    """

    def __init__(self, store: Store, rank: int, size: int, connections: int = 1) -> None:
        self._others = [peer for peer in range(size) if peer != rank]
        self.waiters = Waiters()

        def another(number: int) -> Any:
            return _connected(reconnected(PrefixStore(f"connection/{number}", store)), rank, size)

        more = [begun(partial(another, number)) for number in range(1, connections)]  # at once: a path may be long
        self._made: list[Any] = [_connected(store, rank, size), *(one.result() for one in more)]

    def post(self, what: str, memory: Tensor, peer: int, tag: int, *, spread: bool = False) -> Wait:
        """Posts a message, by "send" or "recv"; one of a group that is closed, or cannot be posted, has failed.

        spread: whether a long one goes by several connections; of the same length on both sides then.
        """
        made = self._made  # read once: another thread may close it
        try:
            if not made:
                raise RuntimeError("this communicator is closed")
            count = max(1, min(len(made), memory.numel() // PIECE_BYTES)) if spread else 1
            pieces = zip(made, memory.tensor_split(count), strict=False)
            works = [getattr(by, what)([piece], peer, tag) for by, piece in pieces]
            return self.waiters.wait_for(works[0] if count == 1 else _Works(works))
        except RuntimeError as error:
            self.waiters.tell()
            return Wait(None, done=True, error=error.with_traceback(None))

    def sum(self, tensor: Tensor) -> Wait:
        """Starts a sum, which keeps the group: the group's end would wait for it while Python stands still."""
        made = self._made
        if not made:
            raise RuntimeError("this communicator is closed")
        return self.waiters.wait_for(made[0].allreduce([tensor], AllreduceOptions()), keeps=made)

    def end(self, timeout: float) -> None:
        """Ends what is in flight, then the threads, then the group: a thread that waits at exit aborts the process.

        A wait that is in vain closes all connections, and so ends all others. It is one for a message that nobody
        sends: who waits for another's message may take it, and that one waits for ever.
        """
        made, self._made = self._made, []
        for by, peer in itertools.product(made, self._others):
            with suppress(RuntimeError):  # for each of them, as one whose peer is gone closes no other
                by.recv([torch.empty(1, dtype=torch.uint8)], peer, END_TAG).wait(GIVE_UP)
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


class Mailbox(SignalLine):
    """Short messages of one rank. Each receive has a waiter's thread; gloo's receive from anybody could not be ended.

    tag: of all messages. nbytes: the most that one holds. A message is on its way until its receiver has posted room
    for it.
    """

    def __init__(self, data: GlooGroup, rank: int, size: int, *, tag: int, nbytes: int) -> None:
        self._data, self._tag, self._nbytes = data, tag, nbytes
        self._written: list[Wait] = []
        self._sending: dict[int, Wait] = {}  # the last message to each peer
        self._coming = {peer: self._post(peer) for peer in range(size) if peer != rank}

    def send(self, peer: int, message: bytes) -> None:
        """Sends a message, also after others that are in flight; does not block."""
        framed = torch.frombuffer(bytearray(len(message).to_bytes(LENGTH_BYTES, "little") + message), dtype=torch.uint8)
        self._sending[peer] = wait = self._data.post("send", framed, peer, self._tag)
        self._written = [*(written for written in self._written if not written.done), wait]

    def sent(self, peer: int) -> bool:
        wait = self._sending.get(peer)
        if wait is not None and wait.error is not None:
            raise PeerLost(peer, wait.error)
        return wait is None or wait.done

    def received(self) -> list[tuple[int, bytes]]:
        messages = []
        for peer, (room, wait) in list(self._coming.items()):
            if wait.done and wait.error is None:
                messages.append((peer, _message(room)))
                self._coming[peer] = self._post(peer)
        return messages

    def lost(self) -> list[PeerLost]:
        """Peers whose connection is gone."""
        return [PeerLost(peer, wait.error) for peer, (_, wait) in self._coming.items() if wait.error is not None]

    def flush(self, seconds: float) -> None:
        """Waits at most `seconds` for the messages that were sent to be on their way."""
        end = time.monotonic() + seconds
        while not all(wait.done for wait in self._written) and time.monotonic() < end:
            time.sleep(FLUSH_POLL_SECONDS)

    def close(self) -> None:
        """Leaves what is in flight to the group's end, which closes connections."""

    def _post(self, peer: int) -> tuple[Tensor, Wait]:
        room = torch.zeros(LENGTH_BYTES + self._nbytes, dtype=torch.uint8)
        return room, self._data.post("recv", room, peer, self._tag)


def _message(room: Tensor) -> bytes:
    """Message in a buffer. Its length is not trusted: a message that is cut does not pass its check."""
    memory = room.numpy().tobytes()
    return memory[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")]
