"""A dense sum that is quantised twice: once by every rank, and once by the rank that sums.

What is rounded off is given back to one rank each time, for error feedback on both sides: DoubleSqueeze (Tang et al.,
ICML 2019).

Float32 travels in 8, 4 or 2 bits an element, and 2 bytes a block of 1,024 for its scale, block by block, as 8-bit
optimizers do (Dettmers et al., ICLR 2022). The scale is a power of two, so that what is rounded and what is left over
are the input exactly. Of 8 bits it is the least that clips nothing. In 4 and 2 bits it has a sign, which gives the side
of the largest element the step more that two's complement has, and is the one with the least squared error; what it
clips off large elements waits for the next sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from communicators.schedule import Payload, Round, Schedule
from communicators.schedules.dense import allgather_blocks, block_bounds

BLOCK = 1024
BITS = (8, 4, 2)
LEAST = -126
"""The least exponent of a normal number."""

STEPS = {8: (-127, 127), 4: (-8, 7), 2: (-2, 1)}
"""Least and most steps of the scale, by bits."""

SCALES = {8: 1, 4: 4, 2: 6}
"""Number of scales to choose from, by bits: the least that clips nothing on either side, and its halves."""

PIECE = 64
"""Number of blocks that a CPU takes at a time, so that they stay in its cache: three times as fast as all at once."""


class Rounded(NamedTuple):
    """Result of a quantised sum.

    total: the agreed sum. dropped: what this rank must add to its residual; over all ranks, inputs = total + dropped.
    """

    total: Tensor
    dropped: Tensor


def quantised_allreduce(x: Tensor, rank: int, size: int, *, bits: int = 8) -> Schedule[Rounded]:
    """Sum over ranks of 1-D float32, with Q that rounds to `bits` (8, 4 or 2) block by block.

        total ← Q(Σ x or Q(x)) by span; the rank that owns a span adds its own x without rounding

    A split, in which every rank gets its span of all, and a gather of the sums: P − 1 messages in one round, then
    ⌈log P⌉ rounds (Bruck); 2n(P − 1)/P elements of `bits` bits, and the scales. With 2 bits the sums travel in 4, since
    all ranks share their error. Scales are powers of two, so sums of what is rounded and of what is left over are exact
    where float32 is.
    Raises ValueError for another number of bits, TypeError for another dtype.
    """
    _check(x, bits)
    if size == 1:
        return Rounded(x.clone(), torch.zeros_like(x))
    spans = quantised_spans(x.numel(), size)
    dropped = torch.empty_like(x)
    gives: dict[int, Tensor] = {}
    for peer in [(rank + distance) % size for distance in range(1, size)]:  # not all send to the same one first
        span = slice(*spans[peer])
        gives[peer] = packed(x[span], bits)
        torch.sub(x[span], unpacked(gives[peer], len(x[span]), bits), out=dropped[span])
    own = slice(*spans[rank])
    sends = {peer: Payload.of(given) for peer, given in gives.items()}
    received = yield Round(sends, dict.fromkeys(sends, quantised_nbytes(len(x[own]), bits)))
    total = x[own].clone()
    for peer in sorted(received):
        total += unpacked(received[peer].view(torch.int8), len(total), bits)
    of_sums = max(bits, 4)
    coded = packed(total, of_sums)
    torch.sub(total, unpacked(coded, len(total), of_sums), out=dropped[own])
    lengths = [high - low for low, high in spans]
    nbytes = [quantised_nbytes(n, of_sums) for n in lengths]
    gathered = yield from allgather_blocks(coded.view(torch.uint8), nbytes, rank, size)
    sums = x.new_empty(-(-x.numel() // BLOCK) * BLOCK)
    for block, (low, high) in zip(gathered, spans, strict=True):
        unpacked(block.view(torch.int8), high - low, of_sums, out=sums[low:])
    return Rounded(sums[: x.numel()], dropped)


def quantised_spans(numel: int, size: int) -> list[tuple[int, int]]:
    """Spans that the ranks sum: whole blocks; the last one may be shorter."""
    bounds = block_bounds(-(-numel // BLOCK), size)
    return [(min(low * BLOCK, numel), min(high * BLOCK, numel)) for low, high in bounds]


def _check(x: Tensor, bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, expected one of {BITS}")
    if x.dtype != torch.float32 or x.dim() != 1:
        raise TypeError(f"a tensor of {x.dtype} and shape {tuple(x.shape)} given, expected 1-D float32")


def packed(x: Tensor, bits: int = 8) -> Tensor:
    """Packs 1-D float32, from the beginning of a block on, into int8: all elements, then all scales.

    Each element becomes the nearest multiple of ±2^e within `STEPS`; of `SCALES` the one that leaves the least
    Σ (x − Q(x))².
    `x - unpacked(...)` is exact, except that for a block with NaN or inf it is NaN.
    """
    steps, scales = zip(*(_rounded(piece, bits) for piece in _pieces(_in_blocks(x))), strict=True)
    return torch.cat([_joined(torch.cat(steps).view(-1)[: x.numel()], bits), torch.cat(scales).view(torch.int8)])


def _pieces(blocks: Tensor) -> Sequence[Tensor]:
    return torch.split(blocks, PIECE) if blocks.device.type == "cpu" else [blocks]


def _rounded(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Steps of blocks, int8, and their scales, bfloat16."""
    least, most = STEPS[bits]
    high, low = blocks.amax(1), blocks.amin(1)
    largest = torch.maximum(high, -low)
    fraction, exponent = torch.frexp(largest)  # largest = fraction · 2^exponent, 1/2 ≤ fraction < 1
    beyond = fraction >= (most + 0.5) / (most + 1)  # would be rounded to one step too many on the shorter side
    exponent = (exponent - (bits - 1) + beyond.int()).clamp(LEAST, _most_exponent(bits))
    exponent = torch.where(largest.isfinite(), exponent, 0)
    side = torch.where((high > -low) & (-least > most), -1.0, 1.0)
    if SCALES[bits] > 1:
        exponent = (exponent - _halvings(blocks / (side * _power(exponent))[:, None], bits)).clamp(min=LEAST)
    scale = side * _power(exponent)
    steps = _nearest(blocks / scale[:, None], bits).nan_to_num(0.0)
    return steps.to(torch.int8), torch.where(largest.isfinite(), scale, torch.nan).bfloat16()


def _nearest(scaled: Tensor, bits: int) -> Tensor:
    return scaled.round().clamp_(*STEPS[bits])


def unpacked(bytes_: Tensor, numel: int, bits: int = 8, out: Tensor | None = None) -> Tensor:
    """The float32 elements that `packed` gave, rounded. out: memory for whole blocks of them, at least."""
    nbytes = _steps_nbytes(numel, bits)
    coded, scales = bytes_.split_with_sizes([nbytes, bytes_.numel() - nbytes])
    most = 2.0 ** _most_exponent(bits)
    scale = scales.clone().view(torch.bfloat16).float().clamp(-most, most)
    steps = _in_blocks(_steps(coded, numel, bits))
    found = scale.new_empty(steps.shape) if out is None else out[: steps.numel()].view(steps.shape)
    for parts in zip(*map(_pieces, (steps, scale[:, None], found)), strict=True):
        torch.mul(parts[0], parts[1], out=parts[2])
    return found.view(-1)[:numel]


def quantised_nbytes(numel: int, bits: int = 8) -> int:
    """Bytes of `numel` packed elements."""
    return _steps_nbytes(numel, bits) + 2 * -(-numel // BLOCK)


def _steps_nbytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def _most_exponent(bits: int) -> int:
    """Largest exponent with which the most steps do not overflow."""
    return 128 - bits


def _halvings(scaled: Tensor, bits: int) -> Tensor:
    """How often each block's scale, 1, is to be halved for the least squared error."""
    errors = []
    for halved in range(SCALES[bits]):
        finer = scaled * 2.0**halved
        errors.append((finer - _nearest(finer, bits)).square_().sum(1) * 4.0**-halved)
    return torch.stack(errors).argmin(0).int()


def _joined(steps: Tensor, bits: int) -> Tensor:
    """Steps as int8; those of fewer bits side by side in one byte, the first in the lowest."""
    if bits == 8:
        return steps
    each = 8 // bits
    groups = torch.cat([steps, steps.new_zeros(-steps.numel() % each)]).view(-1, each)
    fields = [(groups[:, at] & ((1 << bits) - 1)) << (bits * at) for at in range(each)]
    return torch.stack(fields).sum(0, dtype=torch.int8)


def _steps(coded: Tensor, numel: int, bits: int) -> Tensor:
    if bits == 8:
        return coded
    fields = [(coded << (8 - bits - at)) >> (8 - bits) for at in range(0, 8, bits)]  # >> keeps the sign
    return torch.stack(fields, 1).view(-1)[:numel]


def _in_blocks(x: Tensor) -> Tensor:
    """Blocks of shape (blocks, BLOCK), the last one filled up with zeros."""
    missing = -x.numel() % BLOCK
    return (torch.cat([x, x.new_zeros(missing)]) if missing else x).view(-1, BLOCK)


def _power(exponent: Tensor) -> Tensor:
    """2^e exactly, by the bits of a float32."""
    return ((exponent.int() + 127) << 23).view(torch.float32)
