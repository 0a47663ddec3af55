"""Sums of two sparse vectors by the kernels."""

from sparse_compress.native.copied import copied
from sparse_compress.native.library import kernels
from sparse_compress.native.scratch import SCRATCH
from sparse_compress.vector import SparseVector


def merged(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector | None]:
    """The k largest of a + b, 0 < k, and the others; the whole union and None where it has no more than k."""
    indices, values, count, spare = _union(a, b)
    if count <= k:
        return copied(indices, values, count, a.numel), None
    kept = SparseVector.allocate(k, a.numel, a.dtype, a.device)
    cut = SparseVector.allocate(count - k, a.numel, a.dtype, a.device)
    ends = (kept.indices, kept.values, cut.indices, cut.values)
    kernels().sc_split(indices, values, count, k, *(end.data_ptr() for end in ends), spare)
    SCRATCH.trim()
    return kept, cut


def added(a: SparseVector, b: SparseVector) -> SparseVector:
    """a + b over the union of their indices."""
    indices, values, count, _ = _union(a, b)
    return copied(indices, values, count, a.numel)


def _union(a: SparseVector, b: SparseVector) -> tuple[int, int, int, int]:
    """Addresses of indices and values, their number, and as much scratch memory again as one of them."""
    most = len(a) + len(b) + 64
    indices = SCRATCH.of(12 * most)
    values, spare = indices + 4 * most, indices + 8 * most
    of_a = a.indices.data_ptr(), a.values.data_ptr(), len(a)
    of_b = b.indices.data_ptr(), b.values.data_ptr(), len(b)
    count: int = kernels().sc_union(*of_a, *of_b, indices, values)
    return indices, values, count, spare
