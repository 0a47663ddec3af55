"""Increasing indices in about 2 + log₂(n/k) bits each, in a size that n and k alone decide.

Elias–Fano (Elias, 1974; Fano, 1971): of every index the l = ⌊log₂(n/k)⌋ low bits are stored as they are; the rest,
the bucket index >> l, is stored as the differences between neighbours in unary: bit (index >> l) + j is set for the
j-th index. That is k·l + k + (n − 1 >> l) bits, within 0.56 bits an entry of the entropy bound when n ≫ k ≫ 1,
and, unlike deltas of a fitted width, the same number for all indices: no round of sizes has to go first.

Low bits are stored in planes, bit 0 of all indices first, each filled up to whole bytes; then the unary part.
"""

import torch
from torch import Tensor

from sparse_compress.native.library import kernels


def nbytes(numel: int, count: int) -> int:
    """Bytes of ``count`` indices below ``numel``."""
    low, high = _bits(numel, count)
    return low * -(-count // 8) + -(-high // 8)


def pack(indices: Tensor, numel: int) -> Tensor:
    """Packs ``indices``, int32, (k,), strictly increasing, as uint8, (nbytes(numel, k),); nothing is read back."""
    low, high = _bits(numel, len(indices))
    if library := kernels(indices, (torch.int32,)):
        packed = torch.empty(nbytes(numel, len(indices)), dtype=torch.uint8, device="cpu")
        library.sc_pack_indices(indices.data_ptr(), len(indices), low, high, packed.data_ptr())
        return packed
    planes = indices.bitwise_right_shift(_column(low, indices.device)).bitwise_and_(1).to(torch.uint8)
    places = (indices >> low) + torch.arange(len(indices), device=indices.device)
    unary = torch.zeros(high, dtype=torch.uint8, device=indices.device).index_fill_(0, places, 1)
    return torch.cat([_to_bytes(planes).view(-1), _to_bytes(unary)])


def unpack(data: Tensor, numel: int, out: Tensor) -> Tensor:
    """Unpacks as many indices as ``out``, int32, has room for; nothing is read back.

    Raises ValueError for another length, and on a CPU where they are not as many. The caller checks that
    they increase and are below ``numel``; on a GPU corrupted indices only stay within the memory.
    """
    count = len(out)
    if data.numel() != nbytes(numel, count):
        raise ValueError(f"{data.numel()} bytes given, but {count} indices below {numel} take {nbytes(numel, count)}")
    low, high = _bits(numel, count)
    if library := kernels(data, (torch.uint8,)):
        _check_count(library.sc_unpack_indices(data.data_ptr(), count, low, high, out.data_ptr()), count)
        return out
    plane = -(-count // 8)
    unary = _to_bits(data[low * plane :])[:high]
    if data.is_cpu:
        _check_count(int(unary.sum()), count)
    # The j-th set bit, for all j: each set bit knows its j, the others write to a place that is cut off.
    place = (unary.cumsum(0) - 1).masked_fill(unary == 0, count).clamp_(max=count)
    positions = torch.arange(high, device=data.device, dtype=torch.int32)
    found = torch.zeros(count + 1, dtype=torch.int32, device=data.device).index_copy_(0, place, positions)
    indices = found[:count] - torch.arange(count, device=data.device, dtype=torch.int32) << low
    planes = _to_bits(data[: low * plane].view(low, plane))[:, :count].int()
    return torch.add(indices, (planes << _column(low, data.device)).sum(0, dtype=torch.int32), out=out)


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
