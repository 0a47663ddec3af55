"""Agreement of all ranks on the facts of a call, before its first message: ⌈log P⌉ rounds of one size.

Dissemination (Hensgen, Finkel & Manber 1988) of two sides: the lowest rank heard of, and the lowest one whose facts
differ from its. Hearing of a rank twice changes nothing, so any P works.
"""

import struct
import zlib
from typing import TypeAlias

import torch

from communicators import errors
from communicators.errors import CollectiveError
from communicators.schedule import Payload, Round, Schedule, powers_of_two

FACTS_BYTES = 244
_SIDE = struct.Struct(f"<i{FACTS_BYTES}s")  # rank (-1: nobody), facts

Side: TypeAlias = tuple[int, bytes]
NOBODY: Side = (-1, b"")


def agreement(facts: str, number: int, rank: int, size: int) -> Schedule[None]:
    """Raises the same CollectiveError on every rank unless all hold the same facts."""
    sides = ((rank, _text(facts)), NOBODY)
    for distance in powers_of_two(below=size):
        to, source = (rank + distance) % size, (rank - distance) % size
        packed = bytearray(b"".join(_SIDE.pack(*side) for side in sides))
        sent = Payload.of(torch.frombuffer(packed, dtype=torch.uint8))
        received = yield Round({to: sent}, {source: len(packed)})
        theirs = _SIDE.iter_unpack(received[source].body.numpy().tobytes())
        sides = _lowest({*sides, *((one, text.rstrip(b"\0")) for one, text in theirs)})
        if not all(side == NOBODY or side[0] in range(size) for side in sides):
            raise CollectiveError(
                f"corrupted agreement: rank {rank} got from rank {source} what no rank has sent; is every payload that "
                "comes checked by call.accept()?"
            )
    (one, ours), (other, others) = sides
    if other >= 0:
        shown = [text.decode(errors="replace") for text in (ours, others)]
        raise CollectiveError(errors.mismatch(number, one, shown[0], other, shown[1]))


def _lowest(sides: set[Side]) -> tuple[Side, Side]:
    known = sorted(sides - {NOBODY})
    return known[0], next((side for side in known if side[1] != known[0][1]), NOBODY)


def _text(facts: str) -> bytes:
    text = facts.encode()
    if len(text) <= FACTS_BYTES:
        return text
    digest = f"… #{zlib.crc32(text):08x}".encode()
    return text[: FACTS_BYTES - len(digest)] + digest
