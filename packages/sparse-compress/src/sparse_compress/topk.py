"""Exact selection from a dense tensor: the k largest magnitudes, or all from a key on."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from sparse_compress.arguments import flatten, integer
from sparse_compress.gpu import kernels_take
from sparse_compress.magnitude import largest, largest_on_device, magnitude_keys
from sparse_compress.native.library import take
from sparse_compress.native.selecting import select, select_reaching
from sparse_compress.vector import SparseVector
from sparse_compress.vector_format import WIRE_DTYPES


def topk(x: Tensor, k: int) -> SparseVector:
    """Selects the k elements of ``x`` largest in magnitude, as a sparse vector over ``x`` flattened.

        >>> topk(torch.tensor([0.0, 3.0, -5.0, 3.0]), 2).to_dense()
        tensor([ 0.,  3., -5.,  0.])

    The order is that of the bits without the sign: finite < inf < NaN, so non-finite elements come first. Ties go to
    the lowest index.

    On a CPU a compiled kernel takes float32 in one sweep as a rule, without a temporary of x's size; without a compiled
    file (``native``), or for other dtypes, NumPy partitions with temporaries of x's size. On a GPU Triton does radix
    select (``gpu``); without Triton, or for float64, torch sorts with temporaries. No GPU is waited for.

    Args:
        x: Dense tensor of any shape; float16, bfloat16, float32 or float64.
        k: Number of entries, ≥ 0.

    Returns:
        Exactly min(k, n) entries, explicit zeros included, so that its size on the wire is known beforehand.

    Raises:
        TypeError: x has another dtype or layout, or k is no integer.
        ValueError: k < 0, or x has more than 2³¹ − 1 elements.
    """
    k = integer(k, "k", expected="the number of entries to select")
    flat = flatten(x)
    k = min(k, len(flat))
    if k == len(flat):
        return gather(flat, torch.arange(k, device=flat.device))
    if k and kernels_take(flat):
        return _topk_in_triton(flat, k)
    if k and take(flat):
        return select(flat, k)
    return gather(flat, _positions_on_cpu(flat, k) if flat.is_cpu else largest_on_device(flat, k))


def reaching(flat: Tensor, key: int, k: int) -> SparseVector:
    """Selects the elements of a 1-D tensor with that key (magnitude as an integer) or larger; the k largest, if more.

    NaN and inf reach any key. On a GPU their number is read back.
    """
    key = reachable(key, flat.dtype)
    if k and take(flat):
        return select_reaching(flat, key, k)
    positions = (magnitude_keys(flat) >= key).nonzero().view(-1)
    return gather(flat, positions) if len(positions) <= k else topk(flat, k)


def reachable(key: int, dtype: torch.dtype) -> int:
    """Limits a key to that of inf."""
    return min(key, _key_of_inf(dtype))


@cache
def _key_of_inf(dtype: torch.dtype) -> int:
    return int(magnitude_keys(torch.tensor(torch.inf, dtype=dtype)))


def _positions_on_cpu(flat: Tensor, k: int) -> Tensor:
    return torch.from_numpy(np.flatnonzero(largest(magnitude_keys(flat).numpy(), k)))


def _topk_in_triton(flat: Tensor, k: int) -> SparseVector:
    from sparse_compress.gpu import select  # not before a GPU tensor comes: Triton is optional

    with torch.cuda.device(flat.device):
        return select.topk(flat, k)


def gather(flat: Tensor, positions: Tensor) -> SparseVector:
    """Gathers the elements of a 1-D tensor at ``positions`` (int64, increasing)."""
    selected = SparseVector.allocate(len(positions), len(flat), WIRE_DTYPES[flat.dtype], flat.device)
    selected.indices.copy_(positions)
    selected.values.copy_(flat.index_select(0, positions))
    return selected
