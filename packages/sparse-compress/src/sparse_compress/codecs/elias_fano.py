"""Increasing indices in about 2 + log₂(n/k) bits each, in a size that n and k alone decide.

Elias–Fano (Elias, 1974; Fano, 1971): of every index the l = ⌊log₂(n/k)⌋ low bits are stored as they are; the rest,
the bucket index >> l, is stored as the differences between neighbours in unary: bit (index >> l) + j is set for the
j-th index. That is k·l + k + (n − 1 >> l) bits, at most 0.6 bits an entry above the entropy bound when n ≫ k,
and, unlike deltas of a fitted width, the same number for all indices: no round of sizes has to go first.

Low bits are stored in planes, bit 0 of all indices first, each filled up to whole bytes; then the unary part.
"""

import numpy as np
import torch
from torch import Tensor

from sparse_compress.native import packing
from sparse_compress.native.library import ready


def nbytes(numel: int, count: int) -> int:
    """Bytes of ``count`` indices below ``numel``."""
    low, high = _bits(numel, count)
    return low * -(-count // 8) + -(-high // 8)


def pack(indices: Tensor, numel: int) -> Tensor:
    """Packs ``indices``, int32, (k,), strictly increasing, as uint8, (nbytes(numel, k),); nothing is read back."""
    if ready(indices):
        return packing.pack_indices(indices, *_bits(numel, len(indices)), nbytes(numel, len(indices)))
    return _pack_on_cpu(indices, numel) if indices.is_cpu else _pack_on_device(indices, numel)


def unpack(data: Tensor, numel: int, count: int, out: Tensor | None = None) -> Tensor:
    """Unpacks the indices, int32, (count,), into ``out`` where that is given; nothing is read back.

    Raises ValueError for another length, and on a CPU where there are not ``count`` indices. The caller checks that
    they increase and are below ``numel``; on a GPU corrupted indices only stay within the memory.
    """
    if data.numel() != nbytes(numel, count):
        raise ValueError(f"{data.numel()} bytes given, but {count} indices below {numel} take {nbytes(numel, count)}")
    if ready(data):
        indices, found = packing.unpack_indices(data, count, *_bits(numel, count), out)
        _check_count(found, count)
        return indices
    indices = _unpack_on_cpu(data, numel, count) if data.is_cpu else _unpack_on_device(data, numel, count)
    return indices if out is None else out.copy_(indices)


def _pack_on_cpu(indices: Tensor, numel: int) -> Tensor:
    low, high = _bits(numel, len(indices))
    given, parts = indices.numpy(), []
    for bit in range(low):
        octet = (given >> (bit & ~7)).astype(np.uint8)
        parts.append(np.packbits(octet & np.uint8(1 << (bit & 7)), bitorder="little"))
    unary = np.zeros(high, bool)
    unary[(given >> low) + np.arange(len(given), dtype=np.int32)] = True
    return torch.from_numpy(np.concatenate([*parts, np.packbits(unary, bitorder="little")]))


def _unpack_on_cpu(data: Tensor, numel: int, count: int) -> Tensor:
    low, high = _bits(numel, count)
    lows, unary = np.split(data.numpy(), [low * -(-count // 8)])
    planes = [np.unpackbits(plane, count=count, bitorder="little") for plane in lows.reshape(low, -(-count // 8))]
    places = np.flatnonzero(np.unpackbits(unary, count=high, bitorder="little"))
    _check_count(len(places), count)
    indices = (places - np.arange(len(places))).astype(np.int32) << low
    for first in range(0, low, 8):  # bytes first: their sums are a fourth of the memory
        octet = np.zeros(count, np.uint8)
        for bit, plane in enumerate(planes[first : first + 8]):
            octet |= plane << np.uint8(bit)
        indices |= octet.astype(np.int32) << first
    return torch.from_numpy(indices)


def _pack_on_device(indices: Tensor, numel: int) -> Tensor:
    low, high = _bits(numel, len(indices))
    planes = indices.bitwise_right_shift(_column(low, indices.device)).bitwise_and_(1).to(torch.uint8)
    places = (indices >> low) + torch.arange(len(indices), device=indices.device)
    unary = torch.zeros(high, dtype=torch.uint8, device=indices.device).index_fill_(0, places, 1)
    return torch.cat([_to_bytes(planes).view(-1), _to_bytes(unary)])


def _unpack_on_device(data: Tensor, numel: int, count: int) -> Tensor:
    low, high = _bits(numel, count)
    plane = -(-count // 8)
    unary = _to_bits(data[low * plane :])[:high]
    # The j-th set bit, for all j: each set bit knows its j, the others write to a place that is cut off.
    place = (unary.cumsum(0) - 1).masked_fill(unary == 0, count).clamp_(max=count)
    positions = torch.arange(high, device=data.device, dtype=torch.int32)
    found = torch.zeros(count + 1, dtype=torch.int32, device=data.device).index_copy_(0, place, positions)
    indices = found[:count] - torch.arange(count, device=data.device, dtype=torch.int32) << low
    planes = _to_bits(data[: low * plane].view(low, plane))[:, :count].int()
    return indices + (planes << _column(low, data.device)).sum(0, dtype=torch.int32)


def _check_count(found: int, count: int) -> None:
    if found != count:
        raise ValueError(f"corrupted indices: {found} given, expected {count}")


def _bits(numel: int, count: int) -> tuple[int, int]:
    """(low bits of an index, bits of all high parts together)."""
    low = (numel // max(count, 1)).bit_length() - 1 if 0 < count <= numel else 0
    return low, (count + (numel - 1 >> low) if count else 0)


def _column(low: int, device: torch.device) -> Tensor:
    """0 … low − 1, int32, (low, 1)."""
    return torch.arange(low, dtype=torch.int32, device=device)[:, None]


def _to_bytes(bits: Tensor) -> Tensor:
    """0s and 1s, uint8, (…, m), eight to a byte, the first in the lowest bit; zeros fill the last byte."""
    *rows, count = bits.shape
    whole = torch.nn.functional.pad(bits, (0, -count % 8)).view(*rows, -(-count // 8), 8)
    return (whole << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def _to_bits(data: Tensor) -> Tensor:
    """uint8, (…, m) to 0s and 1s, (…, 8·m)."""
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten(-2)
