"""One round's collective: every rank's header, then the sum of what those who contribute bring."""

import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import torch
from communicators import CollectiveError, Schedule, schedules
from torch import Tensor

from partial_collectives.deposits import are_finite
from partial_collectives.protocol.events import Header, Stage

_HEADER = struct.Struct("<BBBdqBdqBI")
STAGES = frozenset(Stage)
LONGEST = 1 << 14
"""Most bytes of what a rank says of its settings."""


BITS = {"int8": 8, "int4": 4, "int2": 2}


@dataclass(frozen=True)
class Rounding:
    """Rounding of sums to so many bits an element.

    residual: what it has left out before, on this rank; by_weight: of a mean, which the round's weight multiplies.
    """

    bits: int
    residual: Sequence[Tensor]
    by_weight: bool


def partial_round(
    header: Header, tensors: Sequence[Tensor], rounding: Rounding | None, settings: str, rank: int, size: int
) -> Schedule[tuple[list[Header], list[Tensor], list[Tensor] | None]]:
    """All headers in rank order, and the sums over ranks, the same bits on all of them; none where nobody contributes.

    tensors: 1-D, what this rank brings, or zeros. settings: what has changed in them, for an error where others say
    otherwise. The third list is the residual afterwards, which is this rank's to give again; None where it stays as it
    was: where nothing is rounded, and in a round without weight, if it counts.
    """
    blocks = yield from schedules.allgather_blocks(packed(header), [_HEADER.size] * size, rank, size)
    headers = [unpacked(block) for block in blocks]
    yield from _refuse_parting(headers, settings, rank, size)
    if not any(header.contributes for header in headers):
        return headers, [], None
    weight = sum(each.weight for each in headers) if rounding is not None and rounding.by_weight else 1.0
    totals, residual = [], []
    if rounding is None or not weight:
        for own in tensors:
            totals.append((yield from schedules.allreduce(own, rank, size)))
        return headers, totals, None
    for own, left in zip(tensors, rounding.residual, strict=True):
        x = own + (left if weight == 1 else left * weight)
        rounded = yield from schedules.quantised_allreduce(x, rank, size, bits=rounding.bits)
        totals.append(rounded.total)
        dropped = rounded.dropped.div_(weight)
        if not are_finite([rounded.total, dropped]):  # NaN is of this round alone
            dropped.masked_fill_(~(rounded.total + dropped).isfinite(), 0.0)
        residual.append(dropped)
    return headers, totals, residual


def _refuse_parting(headers: Sequence[Header], settings: str, rank: int, size: int) -> Schedule[None]:
    """Raises one CollectiveError on all ranks where settings have changed on some, and otherwise on others."""
    told = [place for place, header in enumerate(headers) if header.settings]
    others = [place for place in told if headers[place].settings != headers[told[0]].settings]
    if not others:
        return
    own = torch.frombuffer(bytearray(settings.encode()[:LONGEST].ljust(LONGEST)), dtype=torch.uint8)
    blocks = yield from schedules.allgather_blocks(own, [LONGEST] * size, rank, size)
    texts = [bytes(blocks[place].tolist()).decode(errors="replace").rstrip() for place in (told[0], others[0])]
    one, other = (_without(*pair) for pair in (texts, texts[::-1]))
    raise CollectiveError(
        f"settings have parted since all ranks last met: {one}, {other}; every round steps the models of all ranks, so "
        "change settings alike on all, right after synchronize() and before any has finished: a rate that follows a "
        "metric takes one that is the same on all ranks, averaged over them"
    )


def _without(said: str, others: str) -> str:
    """Who says what, but for what the other says as well."""
    who, _, changed = said.partition(" has changed ")
    parts = [part for part in changed.split(", ") if part not in others.partition(" has changed ")[2].split(", ")]
    return f"{who} has changed {', '.join(parts)}" if parts else said


Ended: TypeAlias = tuple[list[Header], list[Tensor]]
"""Result of a round on each of its ranks: headers and sums."""


def recovery(
    ended: int, last: Ended | None, ranks: int, like: Sequence[Tensor], rank: int, size: int
) -> Schedule[Ended | None]:
    """Result, after a death, of the round that others had ended before this rank; None where there is none.

    ended: how many this rank has; last: result of the last of them. ranks: whose headers there are, more than the
    `size` that are left.
    """
    number = torch.tensor([ended], device="cpu").view(torch.uint8)
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
    fields = _HEADER.unpack(bytes(block.tolist()))
    stage, contributes, fresh, weight, deposits, finite, late, late_round, calls, settings = fields
    numbers = 0 <= weight < math.inf and deposits >= 0 and late_round >= -1
    if stage not in STAGES or max(contributes, fresh, finite, calls) > 1 or not numbers:
        raise CollectiveError("the header of a partial round is not one: do all ranks run the same version?")
    brings = bool(contributes), bool(fresh), weight, deposits, bool(finite)
    return Header(Stage(stage), *brings, late, late_round, bool(calls), settings)
