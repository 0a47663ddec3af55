"""One collective in flight on one rank: its schedule, its facts, its number; messages get tag and stamp here.

Worlds differ in how bytes travel; what a call is, and how a wrong message is told from a right one, is the same in
all of them.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from communicators import errors
from communicators.errors import CollectiveError
from communicators.schedule import SLOT_BYTES, Elapse, Payload, Received, Round, Schedule, powers_of_two

COLUMNS = 1024


def checksum(memory: memoryview) -> int:
    """32 bits of 1-D bytes, read once at the speed of memory: a CRC of all of them would take seven times as long.

    The bytes as rows of COLUMNS 64-bit words: the CRC-32 of the columns' sums (modulo 2^64), and of what is left over.
    One changed word changes one sum; two changes meet in one sum only if they lie a multiple of 8 KiB apart.
    """
    rows = len(memory) // (8 * COLUMNS)
    whole = rows * 8 * COLUMNS
    value = 0
    if rows:
        words = np.frombuffer(memory[:whole], dtype=np.uint64)
        value = zlib.crc32(np.add.reduce(words.reshape(rows, COLUMNS), axis=0))  # the method `sum` costs a call more
    return zlib.crc32(memory[whole:], value)


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
        self.doubts: list[Tensor] = []
        self._hashed = zlib.crc32(f"{facts if self.counted else 'agreement'}|{number}|".encode())  # begins each hash

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
            self._hashed = zlib.crc32(f"{self.facts}|{self.number}|".encode())
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

    def stamp(self, payload: Payload) -> None:
        """Writes call and sender into the slot of a payload, on any device; the host does not wait.

        A payload in host memory also gets a checksum of the body; on a device the host would have to read it.
        """
        if payload.memory.is_cpu:
            memory = _memory(payload)
            stamp = _STAMP.pack(*self._header(self.rank, payload.wire_nbytes, memory))
            memory[:SLOT_BYTES] = stamp  # not by pack_into, which zeroes first what an earlier send may be reading
        else:
            payload.memory[:SLOT_BYTES].copy_(self._slot(self.rank, payload), non_blocking=True)

    def cut(self, payload: Payload) -> Payload:
        """The part of a payload that its stamp says has come, for transports that do not tell it."""
        nbytes: int = _STAMP.unpack_from(_memory(payload), 0)[3]
        return payload if nbytes >= payload.wire_nbytes else Payload(payload.memory[: max(nbytes, SLOT_BYTES)])

    def accept(self, source: int, payload: Payload, capacity: int) -> None:
        """Raises unless the payload has the size and carries this call's stamp of that sender."""
        nbytes = payload.nbytes
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
        found = _STAMP.unpack_from(memory, 0)
        expected = self._header(source, payload.wire_nbytes, memory if payload.memory.is_cpu else None)
        if found == expected:
            return
        if found[0] != expected[0] and found[1:] == expected[1:]:
            raise CollectiveError(
                f"corrupted message: what rank {self.rank} got from rank {source} in round {self.turn} of {self.facts} "
                f"is not what was sent (its checksum differs): a network that changes bits, or a schedule that has "
                f"changed a payload after it yielded it"
            )
        raise CollectiveError(
            f"corrupted header: rank {self.rank} got {found} from rank {source}, expected {expected} "
            f"(hash ^ checksum, call, sender, bytes) in round {self.turn} of {self.facts}"
        )

    def accept_unread(self, source: int, payload: Payload) -> None:
        """Like `accept`, for a payload of the right size; the host does not wait: `settle` raises what is wrong."""
        expected = self._slot(source, payload).to(payload.memory.device, non_blocking=True)
        self.doubts.append((payload.memory[:SLOT_BYTES] != expected).any())

    def settle(self) -> None:
        """Raises CollectiveError if an unread payload was not of this call; at the end only, because it reads back."""
        if bool(torch.stack(self.doubts).any()):
            raise CollectiveError(f"corrupted header: rank {self.rank} got a message of another call in {self.facts}")

    def _slot(self, sender: int, payload: Payload) -> Tensor:
        header = self._header(sender, payload.wire_nbytes, _memory(payload) if payload.memory.is_cpu else None)
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
        for peer, nbytes in action.recvs.items():
            if not isinstance(nbytes, int) or nbytes < 0:
                raise ValueError(
                    f"{self.facts}: {nbytes!r} bytes to receive from rank {peer}, expected the body's as a whole number"
                )
        for peer, payload in action.sends.items():
            if not isinstance(payload, Payload):
                raise TypeError(
                    f"{self.facts}: the payload for rank {peer} is {type(payload).__name__}: make it by "
                    "Payload.of(tensor)"
                )


def _memory(payload: Payload) -> Any:
    """Bytes of a payload; on a device, a copy of its slot."""
    memory = payload.memory
    return (memory if memory.is_cpu else memory[:SLOT_BYTES].cpu()).numpy().data


FACTS_BYTES = 244
_SIDE = struct.Struct(f"<i{FACTS_BYTES}s")  # rank (-1: nobody), facts

Side: TypeAlias = tuple[int, bytes]
NOBODY: Side = (-1, b"")


def agreement(facts: str, number: int, rank: int, size: int) -> Schedule[None]:
    """Raises the same CollectiveError on every rank unless all hold the same facts; ⌈log P⌉ rounds of one size.

    Dissemination (Hensgen, Finkel & Manber 1988) of two sides: the lowest rank heard of, and the lowest one whose
    facts differ from its. Hearing of a rank twice changes nothing, so any P works.
    """
    sides = ((rank, _text(facts)), NOBODY)
    for distance in powers_of_two(below=size):
        to, source = (rank + distance) % size, (rank - distance) % size
        received = yield Round({to: Payload.of(_encode(sides))}, {source: 2 * _SIDE.size})
        sides = _join(sides, _decode(received[source].body))
    (one, ours), (other, theirs) = sides
    if other >= 0:
        raise CollectiveError(errors.mismatch(number, one, _shown(ours), other, _shown(theirs)))


def _join(mine: tuple[Side, Side], theirs: tuple[Side, Side]) -> tuple[Side, Side]:
    known = sorted(side for side in {*mine, *theirs} if side != NOBODY)
    others = [side for side in known if side[1] != known[0][1]]
    return known[0], others[0] if others else NOBODY


def _text(facts: str) -> bytes:
    text = facts.encode()
    if len(text) <= FACTS_BYTES:
        return text
    digest = f"… #{zlib.crc32(text):08x}".encode()
    return text[: FACTS_BYTES - len(digest)] + digest


def _shown(text: bytes) -> str:
    return text.decode(errors="replace")


def _encode(sides: tuple[Side, Side]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(_SIDE.pack(*side) for side in sides)), dtype=torch.uint8)


def _decode(buffer: torch.Tensor) -> tuple[Side, Side]:
    (one, ours), (other, theirs) = _SIDE.iter_unpack(buffer.numpy().tobytes())
    return (one, ours.rstrip(b"\0")), (other, theirs.rstrip(b"\0"))
