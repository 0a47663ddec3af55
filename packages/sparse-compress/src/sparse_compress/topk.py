"""Exact top-k by magnitude."""

import numpy as np
import torch
from torch import Tensor

from sparse_compress.arguments import integer
from sparse_compress.chunks import Positions
from sparse_compress.dense_input import flatten
from sparse_compress.gpu.available import kernels_take
from sparse_compress.magnitude import Bits, bits_of, largest_on_device
from sparse_compress.native.dense import take
from sparse_compress.native.selecting import select
from sparse_compress.topk_cpu import largest_entries
from sparse_compress.vector import SparseVector
from sparse_compress.vector_format import WIRE_DTYPES


def topk(x: Tensor, k: int) -> SparseVector:
    """The k elements of ``x`` that are largest in magnitude, as a sparse vector over ``x`` flattened.

        >>> topk(torch.tensor([0.0, 3.0, -5.0, 3.0]), 2).to_dense()
        tensor([ 0.,  3., -5.,  0.])

    The order is that of the bits without the sign: finite < inf < NaN, so non-finite elements come first. Ties go to
    the lowest index.

    On a CPU one sweep over x as a rule and no temporary of its size; compiled for float32, where there is a compiled
    file (``native``). On a GPU radix select in Triton (``gpu``), and without Triton, or for float64, a stable sort with
    temporaries of x's size. Neither waits for the device.

    Args:
        x: Of any shape, dense; float16, bfloat16, float32 or float64.
        k: How many, ≥ 0.

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
        if flat.is_cpu:
            return from_bits(np.arange(k), bits_of(flat), flat)
        positions = torch.arange(k, device=flat.device)
    elif k == 0:
        positions = torch.empty(0, dtype=torch.int64, device=flat.device)
    elif kernels_take(flat):
        return _topk_in_triton(flat, k)
    elif take(flat):
        return select(flat, k)
    elif flat.is_cpu:
        return from_bits(*largest_entries(bits_of(flat), k), flat)
    else:
        positions = largest_on_device(flat, k)
    return gather(flat, positions)


def _topk_in_triton(flat: Tensor, k: int) -> SparseVector:
    from sparse_compress.gpu import select  # not before a GPU tensor comes: Triton is optional

    with torch.cuda.device(flat.device):
        return select.topk(flat, k)


def gather(flat: Tensor, positions: Tensor) -> SparseVector:
    """The elements of a 1-D tensor at ``positions`` (int64, increasing)."""
    selected = SparseVector.allocate(len(positions), len(flat), WIRE_DTYPES[flat.dtype], flat.device)
    selected.indices.copy_(positions)
    selected.values.copy_(flat.index_select(0, positions))
    return selected


def from_bits(positions: Positions, bits: Bits, like: Tensor) -> SparseVector:
    """Entries of a 1-D CPU tensor of the length and dtype of ``like``, their values given by their bits."""
    selected = SparseVector.allocate(len(positions), len(like), WIRE_DTYPES[like.dtype], like.device)
    selected.indices.numpy()[:] = positions
    if like.dtype == selected.dtype:
        bits_of(selected.values)[:] = bits
    else:
        selected.values.copy_(torch.from_numpy(bits).view(like.dtype))
    return selected
