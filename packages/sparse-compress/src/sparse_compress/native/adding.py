"""Sums of two sparse vectors by the kernels."""

from collections.abc import Sequence
from ctypes import c_int64
from typing import NamedTuple

from sparse_compress.native.copied import copied
from sparse_compress.native.library import kernels
from sparse_compress.native.scratch import SCRATCH
from sparse_compress.vector import SparseVector


def merged(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector | None]:
    """The k largest of a + b, 0 < k, and the others; the whole union and None where it has no more than k."""
    union = _union(a, b)
    if union.entries <= k:
        return copied(union.indices, union.values, union.entries, a.numel), None
    parted = _parted(union, a, [a.numel], [k])
    assert parted is not None
    return parted


def merged_to_budgets(
    a: SparseVector, b: SparseVector, highs: Sequence[int], budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector] | None:
    """Of every block of a + b the largest, as many as its budget, and the others; None where a block has fewer.

    highs: where the blocks end, in order.
    """
    return _parted(_union(a, b), a, highs, budgets)


def added(a: SparseVector, b: SparseVector) -> SparseVector:
    """a + b over the union of their indices."""
    union = _union(a, b)
    return copied(union.indices, union.values, union.entries, a.numel)


class _Union(NamedTuple):
    """Where indices and values lie in scratch memory, how many, and where as much memory as one takes is spare."""

    indices: int
    values: int
    entries: int
    spare: int


def _union(a: SparseVector, b: SparseVector) -> _Union:
    most = len(a) + len(b) + 64
    indices = SCRATCH.of(12 * most)
    values, spare = indices + 4 * most, indices + 8 * most
    of_a = a.indices.data_ptr(), a.values.data_ptr(), len(a)
    of_b = b.indices.data_ptr(), b.values.data_ptr(), len(b)
    return _Union(indices, values, kernels().sc_union(*of_a, *of_b, indices, values), spare)


def _parted(
    union: _Union, like: SparseVector, highs: Sequence[int], budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector] | None:
    most, blocks = sum(budgets), len(budgets)
    if union.entries < most:
        return None
    kept = SparseVector.allocate(most, like.numel, like.dtype, like.device)
    cut = SparseVector.allocate(union.entries - most, like.numel, like.dtype, like.device)
    ends = (end.data_ptr() for end in (kept.indices, kept.values, cut.indices, cut.values))
    sizes = (c_int64 * blocks)(*highs), (c_int64 * blocks)(*budgets), blocks
    done = kernels().sc_split(union.indices, union.values, union.entries, *sizes, *ends, union.spare)
    SCRATCH.trim()
    return (kept, cut) if done else None
