"""The first use of new facts: one small exchange by which all ranks learn whether they mean the same call."""

from __future__ import annotations

import struct
import zlib
from typing import TypeAlias

import torch

from communicators import errors
from communicators.errors import CollectiveError
from communicators.schedule import Payload, Round, Schedule
from communicators.schedules.dense import powers_of_two

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
