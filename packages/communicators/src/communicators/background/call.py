"""One collective in flight on one rank: its schedule, its facts, its number; messages get tag and stamp here.

Worlds differ in how bytes travel; what a call is, and how a wrong message is told from a right one, is the same in
all of them.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from communicators.errors import CollectiveError
from communicators.schedule import SLOT_BYTES, Elapse, Payload, Received, Round, Schedule

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
_TAG = (1 << TAG_BITS) - 1

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
        prelude: Schedule[None] | None = None,
    ) -> None:
        self.rank, self.size, self.facts, self.number = rank, size, facts, number
        self.value: Any = None
        self.doubts: list[Tensor] = []
        self._bounded, self._schedule = False, schedule
        self._begin(*((schedule, facts) if prelude is None else (prelude, "agreement")))

    def _begin(self, rounds: Schedule[Any], text: str) -> None:
        self._rounds, self.turn, self.counted = rounds, -1, rounds is self._schedule
        self.sent: dict[int, int] = {}  # messages so far, by peer
        self.heard: dict[int, int] = {}
        self._hashed = zlib.crc32(f"{text}|{self.number}|".encode())  # begins each hash

    def step(self, received: Received) -> Round | Elapse | NativeSum | None:
        """Hands over what the last round received; returns what comes next, None at the end (`value` is then set)."""
        try:
            action = self._rounds.send(received) if self.turn >= 0 else next(self._rounds)
        except StopIteration as stop:
            if self.counted:
                self.value = stop.value
                return None
            self._begin(self._schedule, self.facts)
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

    def waits(self, peers: Iterable[int]) -> str:
        """Phrase that says who waits for whom."""
        whom = ", ".join(str(peer) for peer in sorted(set(peers))) or "nobody"
        return f"rank {self.rank} waits for rank {whom} in call {self.number}, round {self.turn} of {self.facts}"

    def tag(self, peer: int, messages: dict[int, int]) -> int:
        """Tag of the next message to this peer, or from it. messages: `sent` or `heard`."""
        messages[peer] = number = messages.get(peer, 0) + 1
        return zlib.crc32(b"%d" % number, self._hashed) & _TAG

    def key(self, peer: int, *, sends: bool) -> str:
        """Text by which both ends know the next message to this peer, or from it, in the call."""
        source, target = (self.rank, peer) if sends else (peer, self.rank)
        number = (self.sent if sends else self.heard).get(peer, 0) + 1
        return f"{zlib.crc32(b'%d' % number, self._hashed):x}.{source}.{target}"

    def stamp(self, payload: Payload) -> None:
        """Writes call and sender into the slot of a payload, on any device; the host does not wait.

        A payload in host memory also gets a checksum of the body; on a device the host would have to read it.
        """
        if payload.memory.is_cpu:
            memory = payload.memory.numpy().data
            stamp = _STAMP.pack(*self._header(self.rank, payload, memory))
            memory[:SLOT_BYTES] = stamp  # not by pack_into, which zeroes first what an earlier send may be reading
        else:
            payload.memory[:SLOT_BYTES].copy_(self._slot(self.rank, payload), non_blocking=True)

    def take(self, source: int, buffer: Payload, device: torch.device) -> Payload:
        """Payload on `device`, once it is accepted, of a buffer in host memory; its stamp says how much has come."""
        nbytes = max(_STAMP.unpack_from(buffer.memory.numpy().data)[3], SLOT_BYTES)
        payload = buffer if nbytes >= buffer.memory.numel() else Payload(buffer.memory[:nbytes])
        self.accept(source, payload, buffer.nbytes)
        return payload if device.type == "cpu" else Payload(payload.memory.to(device))

    def accept(self, source: int, payload: Payload, capacity: int) -> None:
        """Raises unless the payload has the size and carries this call's stamp of that sender."""
        if payload.nbytes != capacity:
            self._refuse_size(source, payload.nbytes, capacity)
        readable = payload.memory.is_cpu
        memory = (payload.memory if readable else payload.memory[:SLOT_BYTES].cpu()).numpy().data
        found = _STAMP.unpack_from(memory)
        expected = self._header(source, payload, memory if readable else None)
        if found != expected:
            self._refuse_stamp(source, found, expected)

    def accept_unread(self, source: int, payload: Payload) -> None:
        """Like `accept`, for a payload of the right size; the host does not wait: `settle` raises what is wrong."""
        expected = self._slot(source, payload).to(payload.memory.device, non_blocking=True)
        self.doubts.append((payload.memory[:SLOT_BYTES] != expected).any())

    def settle(self) -> None:
        """Raises CollectiveError if an unread payload was not of this call; at the end only, because it reads back."""
        if bool(torch.stack(self.doubts).any()):
            raise CollectiveError(f"corrupted header: rank {self.rank} got a message of another call in {self.facts}")

    def _slot(self, sender: int, payload: Payload) -> Tensor:
        memory = payload.memory.numpy().data if payload.memory.is_cpu else None
        return torch.frombuffer(bytearray(_STAMP.pack(*self._header(sender, payload, memory))), dtype=torch.uint8)

    def _header(self, sender: int, payload: Payload, memory: memoryview | None) -> tuple[int, int, int, int]:
        """Stamp as four numbers. memory: the payload's; None where it cannot be read, so that there is no checksum."""
        check = 0 if memory is None else checksum(memory[SLOT_BYTES:])
        return zlib.crc32(b"0", self._hashed) & _TAG ^ check, self.number, sender, payload.wire_nbytes

    def _refuse_size(self, source: int, nbytes: int, capacity: int) -> None:
        place = f"in round {self.turn} of {self.facts}"
        if nbytes > capacity:
            raise CollectiveError(
                f"message too long: rank {source} sent {nbytes} bytes, rank {self.rank} has room for {capacity} {place}"
            )
        if not self._bounded:
            raise CollectiveError(
                f"message too short: rank {source} sent {nbytes} bytes, rank {self.rank} expects {capacity} {place}; "
                "where sizes depend on data, say Round(..., bounded=True)"
            )

    def _refuse_stamp(self, source: int, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        place = f"in round {self.turn} of {self.facts}"
        if found[1:] == expected[1:]:
            raise CollectiveError(
                f"corrupted message: what rank {self.rank} got from rank {source} {place} is not what was sent (its "
                "checksum differs): a network that changes bits, or a schedule that has changed a payload after it "
                "yielded it"
            )
        raise CollectiveError(
            f"corrupted header: rank {self.rank} got {found} from rank {source}, expected {expected} (hash ^ checksum, "
            f"call, sender, bytes) {place}"
        )

    def _check(self, action: Round) -> None:
        """Raises TypeError or ValueError for a mistake of the schedule's author."""
        for peer in (*action.sends, *action.recvs):
            if not isinstance(peer, int) or not 0 <= peer < self.size or peer == self.rank:
                given = f"{self.facts}: rank {self.rank} of {self.size} cannot exchange with rank {peer!r}"
                raise ValueError(f"{given} ({type(peer).__name__}), expected another rank as an int")
        for peer, nbytes in action.recvs.items():
            if not isinstance(nbytes, int) or nbytes < 0:
                said = f"{self.facts}: {nbytes!r} bytes to receive from rank {peer}"
                raise ValueError(f"{said}, given as {type(nbytes).__name__}, expected the body's as an int from 0 on")
        for peer, payload in action.sends.items():
            if not isinstance(payload, Payload):
                given = type(payload).__name__
                raise TypeError(f"{self.facts}: the payload for rank {peer} is {given}: make it by Payload.of(tensor)")
