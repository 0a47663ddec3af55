"""One round's collective: every rank's header, then the sum of what those who contribute bring."""

import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import TypeAlias

import torch
from communicators import CollectiveError, Schedule, schedules
from torch import Tensor

from partial_collectives.protocol.events import Header, Stage

_HEADER = struct.Struct("<BBBdqBdq")


BITS = {"int8": 8, "int4": 4, "int2": 2}


def partial_round(
    header: Header, tensors: Sequence[Tensor], bits: int | None, rank: int, size: int
) -> Schedule[tuple[list[Header], list[Tensor], list[Tensor]]]:
    """All headers in rank order, and the sums over ranks, the same bits on all of them; none where nobody contributes.

    tensors: 1-D, what this rank brings, or zeros. bits: of an element on the way; None: as it is. The third list is
    what rounding to them has left out, which is this rank's to give again; empty without `bits`.
    """
    blocks = yield from schedules.allgather_blocks(packed(header), [_HEADER.size] * size, rank, size)
    headers = [unpacked(block) for block in blocks]
    if not any(header.contributes for header in headers):
        return headers, [], []
    totals, dropped = [], []
    for own in tensors:
        if bits is None:
            totals.append((yield from schedules.allreduce(own, rank, size)))
        else:
            rounded = yield from schedules.quantised_allreduce(own, rank, size, bits=bits)
            totals.append(rounded.total)
            dropped.append(rounded.dropped)
    return headers, totals, dropped


Ended: TypeAlias = tuple[list[Header], list[Tensor]]
"""Result of a round on each of its ranks: headers and sums."""


def recovery(
    ended: int, last: Ended | None, ranks: int, like: Sequence[Tensor], rank: int, size: int
) -> Schedule[Ended | None]:
    """Result, after a death, of the round that others had ended before this rank; None where there is none.

    ended: how many this rank has; last: result of the last of them. ranks: whose headers there are, more than the
    `size` that are left.
    """
    number = torch.tensor([ended]).view(torch.uint8)
    blocks = yield from schedules.allgather_blocks(number, [number.numel()] * size, rank, size)
    counts = [int(block.clone().view(torch.int64)) for block in blocks]
    most = max(counts)
    if not most - 1 <= min(counts) <= most:
        raise CollectiveError(f"ranks have ended {sorted(counts)} rounds, expected the same or one less")
    if min(counts) == most:
        return None
    source, nothing = counts.index(most), ([Header(Stage.GONE)] * ranks, list(map(torch.zeros_like, like)))
    headers, sums = last if last is not None and ended == most else nothing
    together = yield from schedules.broadcast(torch.cat(list(map(packed, headers))), rank, size, source)
    headers = [unpacked(block) for block in torch.split(together, _HEADER.size)]
    totals = []
    for own in sums if any(header.contributes for header in headers) else ():
        totals.append((yield from schedules.broadcast(own, rank, size, source)).clone())
    return None if ended == most else (headers, totals)


def packed(header: Header) -> Tensor:
    """Header as bytes: uint8."""
    return torch.frombuffer(bytearray(_HEADER.pack(*astuple(header))), dtype=torch.uint8)


def unpacked(block: Tensor) -> Header:
    """Header from the bytes of `packed`; CollectiveError for other bytes."""
    stage, contributes, fresh, weight, deposits, finite, *late = _HEADER.unpack(bytes(block.tolist()))
    if stage not in tuple(Stage) or max(contributes, fresh, finite) > 1:
        raise CollectiveError("the header of a partial round is not one: do all ranks run the same version?")
    return Header(Stage(stage), bool(contributes), bool(fresh), weight, deposits, bool(finite), *late)
