"""A dense sum that is quantised twice: once by every rank, and once by the rank that sums.

What is rounded off is given back to one rank each time, for error feedback on both sides: DoubleSqueeze (Tang et al.,
ICML 2019).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from communicators.dense_schedules import allgather_blocks, block_bounds
from communicators.quantised.blocks import BITS, BLOCK, packed, packed_nbytes, unpacked
from communicators.schedule import SLOT_BYTES, Round, Schedule, body, frame


class Rounded(NamedTuple):
    """Result of a quantised sum.

    total: the agreed sum. rest: what this rank must add to its residual; over all ranks, inputs = total + rests.
    """

    total: Tensor
    rest: Tensor


def quantised_allreduce(x: Tensor, rank: int, size: int, *, bits: int = 8) -> Schedule[Rounded]:
    """Sum over ranks of 1-D float32, with Q that rounds to `bits` (8 or 4) block by block.

        total ← Q(Σ x or Q(x)) by span; the rank that owns a span adds its own x without rounding

    A split, in which every rank gets its span of all, and a gather of the sums: P − 1 messages in one round, then
    ⌈log P⌉ rounds (Bruck); 2n(P − 1)/P elements of `bits` bits, and the scales. Scales are powers of two, so sums of
    what is rounded and of what is left over are exact where float32 is.
    Raises ValueError for another number of bits, TypeError for another dtype.
    """
    _check(x, bits)
    if size == 1:
        return Rounded(x.clone(), torch.zeros_like(x))
    spans = spans_of(x.numel(), size)
    rest = torch.zeros_like(x)
    gives: dict[int, Tensor] = {}
    for peer in _others(rank, size):
        span = slice(*spans[peer])
        gives[peer] = packed(x[span], bits)
        rest[span] = x[span] - unpacked(gives[peer], len(x[span]), bits)
    own = slice(*spans[rank])
    capacity = SLOT_BYTES + packed_nbytes(len(x[own]), bits)
    sends = {peer: frame(given) for peer, given in gives.items()}
    received = yield Round(sends, dict.fromkeys(sends, capacity))
    total = x[own].clone()
    for peer in sorted(received):
        total += unpacked(body(received[peer], torch.int8), len(total), bits)
    coded = packed(total, bits)
    rest[own] = total - unpacked(coded, len(total), bits)
    lengths = [high - low for low, high in spans]
    nbytes = [packed_nbytes(n, bits) for n in lengths]
    gathered = yield from allgather_blocks(coded.view(torch.uint8), nbytes, rank, size)
    sums = [unpacked(block.view(torch.int8), n, bits) for block, n in zip(gathered, lengths, strict=True)]
    return Rounded(torch.cat(sums), rest)


def spans_of(numel: int, size: int) -> list[tuple[int, int]]:
    """Spans that the ranks sum: whole blocks; the last one may be shorter."""
    bounds = block_bounds(-(-numel // BLOCK), size)
    return [(min(low * BLOCK, numel), min(high * BLOCK, numel)) for low, high in bounds]


def _others(rank: int, size: int) -> list[int]:
    """Other ranks, beginning with the next one, so that not all send to the same one first."""
    return [(rank + distance) % size for distance in range(1, size)]


def _check(x: Tensor, bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, expected one of {BITS}")
    if x.dtype != torch.float32 or x.dim() != 1:
        raise TypeError(f"a tensor of {x.dtype} and shape {tuple(x.shape)} given, expected 1-D float32")
