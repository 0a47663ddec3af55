"""One round's collective: every rank's header, then the sum of what those who contribute bring."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from communicators import CollectiveError, Schedule
from communicators.dense_schedules import allgather_blocks, allreduce
from torch import Tensor

from partial_collectives.protocol.events import Header, Stage

_HEADER = struct.Struct("<BBBBqddq")


def partial_round(
    header: Header, tensors: Sequence[Tensor] | None, like: Sequence[Tensor], rank: int, size: int
) -> Schedule[tuple[list[Header], list[Tensor]]]:
    """All headers in rank order, and the sums over ranks, the same bits on all of them.

    tensors: 1-D, what this rank brings; None is zeros. like: of the same sizes and dtypes. Where nobody contributes
    nothing is sent, and there are no sums.
    """
    blocks = yield from allgather_blocks(packed(header), [_HEADER.size] * size, rank, size)
    headers = [unpacked(block) for block in blocks]
    if not any(header.contributes for header in headers):
        return headers, []
    totals = []
    for number, one in enumerate(like):
        own = torch.zeros_like(one) if tensors is None else tensors[number]
        totals.append((yield from allreduce(own, rank, size)))
    return headers, totals


def packed(header: Header) -> Tensor:
    """As bytes: uint8."""
    return torch.frombuffer(
        bytearray(
            _HEADER.pack(
                header.stage,
                header.contributes,
                header.fresh,
                header.finite,
                header.deposits,
                header.weight,
                header.late,
                header.late_round,
            )
        ),
        dtype=torch.uint8,
    )


def unpacked(block: Tensor) -> Header:
    """What `packed` has packed; CollectiveError for other bytes."""
    stage, contributes, fresh, finite, deposits, weight, late, late_round = _HEADER.unpack(bytes(block.tolist()))
    if stage not in tuple(Stage) or max(contributes, fresh, finite) > 1:
        raise CollectiveError("the header of a partial round is not one: do all ranks run the same version?")
    return Header(
        Stage(stage), bool(contributes), bool(fresh), weight, deposits, bool(finite), late=late, late_round=late_round
    )
