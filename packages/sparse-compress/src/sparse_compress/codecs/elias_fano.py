"""Increasing indices in about 2 + log₂(n/k) bits each, in a size that n and k alone decide.

Elias–Fano (Elias, 1974; Fano, 1971): of every index the l = ⌊log₂(n/k)⌋ low bits are stored as they are; the rest,
the bucket index >> l, is stored as the differences between neighbours in unary: bit (index >> l) + j is set for the
j-th index. That is k·l + k + (n − 1 >> l) bits, at most 0.6 bits an entry above the entropy bound when n ≫ k,
and, unlike deltas of a fitted width, the same number for all indices: no round of sizes has to go first.
"""

import torch
from torch import Tensor


def nbytes(numel: int, count: int) -> int:
    """Bytes of ``count`` indices below ``numel``."""
    low, high = _bits(numel, count)
    return -(-count * low // 8) + -(-high // 8)


def pack(indices: Tensor, numel: int) -> Tensor:
    """``indices``, int32, (k,), strictly increasing, as uint8, (nbytes(numel, k),); nothing is read back."""
    low, high = _bits(numel, len(indices))
    lows = (indices[:, None] >> torch.arange(low, device=indices.device, dtype=torch.int32)) & 1
    places = (indices >> low) + torch.arange(len(indices), device=indices.device)
    highs = torch.zeros(high, dtype=torch.uint8, device=indices.device).index_fill_(0, places, 1)
    return torch.cat([_to_bytes(lows.to(torch.uint8).view(-1)), _to_bytes(highs)])


def unpack(data: Tensor, numel: int, count: int) -> Tensor:
    """The indices, int32, (count,); nothing is read back."""
    low, high = _bits(numel, count)
    middle = -(-count * low // 8)
    weights = 1 << torch.arange(low, device=data.device, dtype=torch.int32)
    lows = (_to_bits(data[:middle])[: count * low].view(count, low) * weights).sum(1, dtype=torch.int32)
    highs = _to_bits(data[middle:])[:high]
    # The j-th set bit, for all j: each set bit knows its j, the others write to a place that is cut off.
    place = (highs.cumsum(0) - 1).masked_fill(highs == 0, count)
    positions = torch.arange(high, device=data.device, dtype=torch.int32)
    found = torch.zeros(count + 1, dtype=torch.int32, device=data.device).index_copy_(0, place, positions)
    buckets = found[:count] - torch.arange(count, device=data.device, dtype=torch.int32)
    return buckets << low | lows


def _bits(numel: int, count: int) -> tuple[int, int]:
    """(low bits of an index, bits of all high parts together)."""
    low = (numel // max(count, 1)).bit_length() - 1 if 0 < count <= numel else 0
    return low, (count + (numel - 1 >> low) if count else 0)


def _to_bytes(bits: Tensor) -> Tensor:
    """0s and 1s, uint8, eight to a byte, the first in the lowest bit; zeros fill the last byte."""
    whole = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _to_bits(data: Tensor) -> Tensor:
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).view(-1)
