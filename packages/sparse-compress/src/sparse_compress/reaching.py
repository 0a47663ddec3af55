"""Selection by a magnitude, given as an integer, that elements have to reach."""

from functools import cache

import torch
from torch import Tensor

from sparse_compress.chunks import Positions, at_least
from sparse_compress.magnitude import Bits, bits_of, magnitude_keys
from sparse_compress.native.dense import take
from sparse_compress.native.selecting import select_reaching
from sparse_compress.topk import from_bits, gather, topk
from sparse_compress.topk_cpu import largest_of
from sparse_compress.vector import SparseVector


def reaching(flat: Tensor, key: int, k: int) -> SparseVector:
    """The elements of a 1-D tensor with that key (magnitude as an integer) or a larger one; the k largest, if more.

    NaN and inf reach any key. On a CPU one sweep, unless very many reach it, and no temporary of the tensor's size. On
    a GPU their number is read back.
    """
    key = reachable(key, flat.dtype)
    if not flat.is_cpu:
        positions = (magnitude_keys(flat) >= key).nonzero().view(-1)
        return gather(flat, positions) if len(positions) <= k else topk(flat, k)
    if k and take(flat):
        return select_reaching(flat, key, k)
    return reached(at_least(bits_of(flat), key, limit_of(len(flat), k)), flat, k)


def reachable(key: int, dtype: torch.dtype) -> int:
    """The key, but no larger than that of inf."""
    return min(key, _key_of_inf(dtype))


@cache
def _key_of_inf(dtype: torch.dtype) -> int:
    return int(magnitude_keys(torch.tensor(torch.inf, dtype=dtype)))


def limit_of(numel: int, k: int) -> int:
    """From how many elements on it would not pay to select all and cut them to k."""
    return 3 * k + numel // 64


def reached(found: tuple[Positions, Bits] | None, flat: Tensor, k: int) -> SparseVector:
    """The elements of a 1-D CPU tensor that were found, None for too many; the k largest, if more."""
    if found is None:
        return topk(flat, k)
    return from_bits(*(found if len(found[0]) <= k else largest_of(*found, k)), flat)
