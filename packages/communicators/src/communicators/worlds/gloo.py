"""torch.distributed by point-to-point, on a gloo group of our own; control messages travel there too.

Threads wait for its messages (`Waiters`); those of rounds go by `EagerMessages`. Short messages beside the data have a
receive always posted from every peer, which tells when one is gone (`Mailbox`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from communicators.background.call import Call
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
from communicators.schedule import Payload, Received, Round
from communicators.worlds.eager import Arrival, EagerMessages
from communicators.worlds.gloo_group import CONTROL_TAG, SIGNAL_TAG, UNCONNECTED, GlooGroup, Wait
from communicators.worlds.meeting import STORE_SECONDS, Rendezvous, in_time

LENGTH_BYTES = 4
SUM_NBYTES = 1 << 20
"""Fewest bytes that gloo sums itself."""
FLUSH_POLL_SECONDS = 1e-3
LONGEST_NAP_SECONDS = 2e-3
"""Where a message that comes ends it."""
CLOSE_SECONDS = 1.0
"""Longest time that the control messages of a closed communicator may take to be sent."""
LOST_SECONDS = 1.0
"""Longest time after a failure of gloo's own sum to find out whose connection was lost."""


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
        self._messages = EagerMessages(self._data)
        self._control = Mailbox(self._data, CONTROL_TAG, CONTROL_BYTES)
        self._end = weakref.finalize(self, self._data.end, timeout=1.0)  # without close(): of a destroyed group
        self._end.atexit = False

    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        pinned, bounded = device.type == "cuda", action.bounded
        buffers = {peer: Payload.on_host(nbytes, pinned=pinned) for peer, nbytes in action.recvs.items()}
        receives = {
            peer: self._messages.receive(
                buffer.memory, peer, call.tag(peer, call.heard), call=call.number, bounded=bounded
            )
            for peer, buffer in buffers.items()
        }
        sends: list[tuple[int, Wait]] = []
        for peer, payload in action.sends.items():
            staged = payload.to_host()
            call.stamp(staged)
            tag = call.tag(peer, call.sent)
            waits = self._messages.send(staged.memory, peer, tag, call=call.number, bounded=bounded)
            sends.extend((peer, wait) for wait in waits)
        return _PendingRound(call, device, buffers, receives, sends, self._messages)

    def duplicate(self, patience: float) -> Transport:
        return self._another(GlooTransport, patience)

    def _another(self, make: Callable[[Rendezvous, float], GlooTransport], patience: float) -> GlooTransport:
        self.duplicates += 1
        there = self.rendezvous.elsewhere(f"duplicate/{self.duplicates}")
        return in_time(lambda: make(there, patience), self.rank, patience)

    def can_sum(self, tensor: Tensor) -> bool:
        """Whether gloo's own sum is the better one: it takes up to 4α more than ours, and less of the core."""
        return super().can_sum(tensor) and tensor.nbytes >= SUM_NBYTES

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
        """A peer whose connection is gone."""
        return next(iter(self._control.lost()), None)

    def close(self) -> None:
        self._control.flush(CLOSE_SECONDS)
        self._end()

    def signal_line(self) -> Mailbox:
        return Mailbox(self._data, SIGNAL_TAG, SIGNAL_BYTES)


@dataclass(eq=False)
class _PendingRound(Pending):
    call: Call
    device: torch.device
    buffers: dict[int, Payload]
    receives: dict[int, Arrival]
    sends: list[tuple[int, Wait]]
    messages: EagerMessages

    def come(self) -> list[int]:
        return [peer for peer, arrival in self.receives.items() if arrival.wait.done]

    def arrived(self) -> bool:
        over = all(arrival.wait.done for arrival in self.receives.values())  # before errors, which come any time
        for peer, wait in self._waits():
            if wait.error is not None:
                raise PeerLost(peer, wait.error)
        return over

    def done(self) -> bool:
        return self.arrived() and all(wait.done for _, wait in self.sends)

    def received(self) -> Received:
        return {peer: self.call.take(peer, buffer, self.device) for peer, buffer in self.buffers.items()}

    def missing(self) -> list[int]:
        return sorted({peer for peer, wait in self._waits() if not wait.done or wait.error is not None})

    def _waits(self) -> list[tuple[int, Wait]]:
        return [*((peer, arrival.wait) for peer, arrival in self.receives.items()), *self.sends]

    def cancel(self) -> None:
        """Leaves them to the group's end, as to give one up would end connections; drops what comes yet in a room."""
        self.messages.cancel(self.receives)


class Mailbox(SignalLine):
    """Short messages of one rank. Each receive has a waiter's thread; gloo's receive from anybody could not be ended.

    tag: of all messages. nbytes: the most that one holds. A message is on its way until its receiver has posted room
    for it.
    """

    def __init__(self, data: GlooGroup, tag: int, nbytes: int) -> None:
        self._data, self._tag, self._nbytes = data, tag, nbytes
        self._sending: dict[int, Wait] = {}  # the last message to each peer
        self._coming = {peer: self._post(peer) for peer in data.others}

    def send(self, peer: int, message: bytes) -> None:
        """Sends a message, also after others that are in flight; does not block."""
        framed = torch.frombuffer(bytearray(len(message).to_bytes(LENGTH_BYTES, "little") + message), dtype=torch.uint8)
        self._sending[peer] = self._data.post("send", framed, peer, self._tag)

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
        while not all(wait.done for wait in self._sending.values()) and time.monotonic() < end:
            time.sleep(FLUSH_POLL_SECONDS)

    def close(self) -> None:
        """Leaves what is in flight to the group's end, which closes connections."""

    def _post(self, peer: int) -> tuple[Tensor, Wait]:
        room = torch.zeros(LENGTH_BYTES + self._nbytes, dtype=torch.uint8, device="cpu")
        return room, self._data.post("recv", room, peer, self._tag)


def _message(room: Tensor) -> bytes:
    """Message in a buffer. Its length is not trusted: a message that is cut does not pass its check."""
    memory = room.numpy().tobytes()
    return memory[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")]
