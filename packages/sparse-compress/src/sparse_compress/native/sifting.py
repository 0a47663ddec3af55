"""Some of the entries of a sparse vector, and their keys in order, by the kernels."""

import torch
from torch import Tensor

from sparse_compress.native.copied import copied
from sparse_compress.native.library import kernels
from sparse_compress.native.scratch import SCRATCH
from sparse_compress.vector import SparseVector

SLACK = 64  # entries that a kernel may write beyond the last one


def larger(sparse: SparseVector, key: int, ties: int) -> SparseVector:
    """The entries of a larger key than that, 0 or more, and the first ``ties`` of those equal to it.

    The vector itself where that is all of them.
    """
    n = len(sparse)
    room = n + SLACK
    indices = SCRATCH.of(16 * room)
    values, others = indices + 4 * room, indices + 8 * room
    count = kernels().sc_filter(*sparse.addresses, n, key, ties, indices, values, others)
    return sparse if count == n else copied(indices, values, count, sparse.numel)


def rising(keys: Tensor, least: int) -> Tensor:
    """The keys, int32, that are ``least`` or larger, the smallest first."""
    room = len(keys) + SLACK
    sorted_ = torch.empty(room, dtype=torch.int32)
    count = kernels().sc_sorted(keys.data_ptr(), len(keys), least, sorted_.data_ptr(), SCRATCH.of(4 * room))
    SCRATCH.trim()
    return sorted_[:count]
