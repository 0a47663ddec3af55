"""One collective in flight on one rank: its schedule, its facts, its number; messages get tag and stamp here.

Worlds differ in how bytes travel; what a call is, and how a wrong message is told from a right one, is the same in
all of them.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from communicators.background.checksum import checksum
from communicators.errors import CollectiveError
from communicators.schedule import SLOT_BYTES, Elapse, Received, Round, Schedule

TAG_BITS = 29
"""MPICH's bound on message tags."""

_STAMP = struct.Struct("<IIII")  # hash of facts and call number ^ checksum of the body, call number, sender, bytes
assert _STAMP.size == SLOT_BYTES


@dataclass(frozen=True, slots=True)
class NativeSum:
    """Transport's own sum in place of a round, posted under the call's number and facts like any other."""

    pending: Any


class Call:
    """A schedule with its place in the sequence of calls of one communicator.

    facts: what all ranks must share (algorithm, numel, dtype, k, settings), as text. The tag of a message is a hash of
    it, the call number and how many messages went from its sender to its receiver in this call before, so that a
    message of another call never matches. (Not the round: ranks that fold into a partner have other round numbers.)
    prelude: rounds that are not counted and whose tags hold the call's number only (the agreement on new facts).
    """

    def __init__(
        self,
        schedule: Schedule[Any],
        *,
        rank: int,
        size: int,
        facts: str,
        number: int,
        device: torch.device | None = None,
        prelude: Schedule[None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.facts, self.number = facts, number
        self.device = device
        self.turn = -1
        self.value: Any = None
        self.counted = prelude is None
        self._bounded = False
        self._schedule = schedule
        self._rounds: Schedule[Any] = schedule if prelude is None else prelude
        self._sent: dict[int, int] = {}  # messages so far, by peer
        self._heard: dict[int, int] = {}
        self._doubts: list[Tensor] = []
        self._hashed = _hash_of(facts if self.counted else "agreement", number)

    def step(self, received: Received) -> Round | Elapse | NativeSum | None:
        """Hands over what the last round received; returns what comes next, None at the end (`value` is then set)."""
        try:
            action = self._rounds.send(received) if self.turn >= 0 else next(self._rounds)
        except StopIteration as stop:
            if self._rounds is self._schedule:
                self.value = stop.value
                return None
            self._rounds, self.counted, self.turn = self._schedule, True, -1
            self._sent.clear()
            self._heard.clear()
            self._hashed = _hash_of(self.facts, self.number)
            return self.step({})
        self.turn += 1
        if isinstance(action, Round):
            self._check(action)
            self._bounded = action.bounded
        elif not isinstance(action, Elapse | NativeSum):
            raise TypeError(
                f"{self.facts}: the schedule yielded {type(action).__name__}, expected a Round(sends, recvs); what is "
                "inside another schedule is reached by `yield from`"
            )
        return action

    def close(self) -> None:
        """Ends the schedule early, so that it releases what it holds."""
        self._rounds.close()
        self._schedule.close()

    def outgoing_tag(self, peer: int) -> int:
        """The tag of the next message to this peer."""
        self._sent[peer] = number = self._sent.get(peer, 0) + 1
        return self._hash(number)

    def incoming_tag(self, peer: int) -> int:
        """The tag of the next message from this peer."""
        self._heard[peer] = number = self._heard.get(peer, 0) + 1
        return self._hash(number)

    def stamp(self, payload: Tensor) -> None:
        """Writes call and sender into the slot of a payload, on any device; the host does not wait.

        A payload in host memory also gets a checksum of the rest; on a device the host would have to read it.
        """
        if payload.is_cpu:
            memory = _memory(payload)
            stamp = _STAMP.pack(*self._header(self.rank, payload.numel(), memory))
            memory[:SLOT_BYTES] = stamp  # not by pack_into, which zeroes first what an earlier send may be reading
        else:
            payload[:SLOT_BYTES].copy_(self._slot(self.rank, payload), non_blocking=True)

    def stamped_nbytes(self, buffer: Tensor) -> int:
        """Length that the payload in a buffer states, for transports that do not tell it."""
        nbytes: int = _STAMP.unpack_from(_memory(buffer), 0)[3]
        return min(nbytes, buffer.numel())

    def accept(self, source: int, payload: Tensor, capacity: int) -> None:
        """Raises unless the payload has the size and carries this call's stamp of that sender."""
        nbytes = payload.numel()
        if nbytes > capacity:
            raise CollectiveError(
                f"message too long: rank {source} sent {nbytes} bytes, rank {self.rank} has room for "
                f"{capacity} in round {self.turn} of {self.facts}"
            )
        if nbytes < capacity and not self._bounded:
            raise CollectiveError(
                f"message too short: rank {source} sent {nbytes} bytes, rank {self.rank} expects {capacity} "
                f"in round {self.turn} of {self.facts}; where sizes depend on data, say Round(..., bounded=True)"
            )
        memory = _memory(payload)
        found = _STAMP.unpack_from(memory, 0) if nbytes >= SLOT_BYTES else None
        expected = self._header(source, nbytes, memory if payload.is_cpu else None)
        if found is not None and found[0] != expected[0] and found[1:] == expected[1:]:
            raise CollectiveError(
                f"corrupted message: what rank {self.rank} got from rank {source} in round {self.turn} of {self.facts} "
                f"is not what was sent (its checksum differs): a network that changes bits, or a schedule that has "
                f"changed a payload after it yielded it"
            )
        if found != expected:
            raise CollectiveError(
                f"corrupted header: rank {self.rank} got {found} from rank {source}, expected {expected} "
                f"(hash ^ checksum, call, sender, bytes) in round {self.turn} of {self.facts}"
            )

    def accept_unread(self, source: int, payload: Tensor) -> None:
        """Like `accept`, for a payload of the right size; the host does not wait: `settle` raises what is wrong."""
        expected = self._slot(source, payload).to(payload.device, non_blocking=True)
        self._doubts.append((payload[:SLOT_BYTES] != expected).any())

    def settle(self) -> None:
        """Raises CollectiveError if an unread payload was not of this call; at the end only, because it reads back."""
        if self._doubts and bool(torch.stack(self._doubts).any()):
            raise CollectiveError(f"corrupted header: rank {self.rank} got a message of another call in {self.facts}")

    def _slot(self, sender: int, payload: Tensor) -> Tensor:
        header = self._header(sender, payload.numel(), _memory(payload) if payload.is_cpu else None)
        return torch.frombuffer(bytearray(_STAMP.pack(*header)), dtype=torch.uint8)

    def _header(self, sender: int, nbytes: int, memory: memoryview | None) -> tuple[int, int, int, int]:
        """Stamp as four numbers. memory: the payload's; None where it cannot be read, so that there is no checksum."""
        check = 0 if memory is None else checksum(memory[SLOT_BYTES:])
        return self._hash(0) ^ check, self.number, sender, nbytes

    def _hash(self, sequence: int) -> int:
        return zlib.crc32(b"%d" % sequence, self._hashed) & ((1 << TAG_BITS) - 1)

    def _check(self, action: Round) -> None:
        """Raises TypeError or ValueError for a mistake of the schedule's author."""
        for peer in (*action.sends, *action.recvs):
            if not isinstance(peer, int) or not 0 <= peer < self.size or peer == self.rank:
                raise ValueError(f"{self.facts}: rank {self.rank} of {self.size} cannot exchange with rank {peer}")
        for peer, capacity in action.recvs.items():
            if not isinstance(capacity, int) or capacity < SLOT_BYTES:
                raise ValueError(
                    f"{self.facts}: {capacity!r} bytes to receive from rank {peer}, expected a whole number with the "
                    f"slot of {SLOT_BYTES} (see framed_nbytes)"
                )
        for peer, payload in action.sends.items():
            if not isinstance(payload, Tensor):
                raise TypeError(
                    f"{self.facts}: the payload for rank {peer} is {type(payload).__name__}: see frame(tensor)"
                )
            if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < SLOT_BYTES:
                raise ValueError(
                    f"{self.facts}: the payload for rank {peer} is {payload.dtype} of shape {tuple(payload.shape)}; "
                    f"expected 1-D uint8 with a slot of {SLOT_BYTES} bytes (see frame)"
                )
            if payload.is_cpu and not _is_free(payload):
                raise ValueError(
                    f"{self.facts}: the payload for rank {peer} has data in its first {SLOT_BYTES} bytes, which belong "
                    "to the communicator and would be overwritten: put a free slot before them with frame(tensor)"
                )


def _hash_of(facts: str, number: int) -> int:
    """The beginning of the hash of every message of a call."""
    return zlib.crc32(f"{facts}|{number}|".encode())


def _is_free(payload: Tensor) -> bool:
    """Whether a payload's slot is empty, or holds the stamp of an earlier message: received payloads are handed on."""
    slot: tuple[int, int, int, int] = _STAMP.unpack_from(_memory(payload), 0)
    return not any(slot) or slot[3] == payload.numel()


def _memory(payload: Tensor) -> Any:
    """Bytes of a payload; on a device, a copy of its slot."""
    return (payload if payload.is_cpu else payload[:SLOT_BYTES].cpu()).numpy().data
