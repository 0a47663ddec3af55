"""Some of the entries of a sparse vector on a CPU, and the order of keys."""

import numpy as np
import torch
from torch import Tensor

from sparse_compress.magnitude import magnitude_keys
from sparse_compress.native import adding, dense, sifting
from sparse_compress.vector import SparseVector

MANY = 1 << 15  # keys: from here on torch sorts by radix, in a quarter of the time; fewer NumPy sorts faster


def larger(sparse: SparseVector, key: int, ties: int = 0) -> SparseVector:
    """The entries whose key (magnitude as an integer) is larger, and the first ``ties`` of those equal to it.

    On a device too, from which their number is read back. The vector itself where that is all of them.
    """
    if key < 0:
        return sparse
    if len(sparse) and dense.takes(sparse):
        return sifting.larger(sparse, key, ties)
    keys = magnitude_keys(sparse.values)
    chosen = keys > key
    if ties:
        tied = keys == key
        chosen |= tied & (tied.cumsum(0) <= ties)
    return where(sparse, chosen)


def where(sparse: SparseVector, chosen: Tensor) -> SparseVector:
    """The entries that a mask chooses. How many they are is read back from the device."""
    # In NumPy a tenth of what indexing by a mask takes.
    positions = torch.from_numpy(np.flatnonzero(chosen.numpy())) if chosen.is_cpu else chosen.nonzero().view(-1)
    return sparse if len(positions) == len(sparse) else at(sparse, positions)


def without(sparse: SparseVector, other: SparseVector) -> SparseVector:
    """The entries whose index the other vector, of the same dtype, does not have. Their number is read back."""
    if not sparse.is_cpu:
        return where(sparse, ~torch.isin(sparse.indices, other.indices))
    if not len(sparse):
        return sparse
    if dense.takes(sparse):
        return adding.without(sparse, other)
    both = np.concatenate([sparse.indices.numpy(), other.indices.numpy()]).view(np.uint32) << 1
    both[len(sparse) :] |= 1
    both.sort(kind="stable")  # finds the two runs and merges them; an index of both stands before its odd twin
    mine = both & 1 == 0
    missing = mine.copy()
    missing[:-1] &= both[:-1] ^ 1 != both[1:]
    return at(sparse, torch.from_numpy(np.cumsum(mine).take(np.flatnonzero(missing)) - 1))


def at(sparse: SparseVector, positions: Tensor) -> SparseVector:
    """The entries at positions, int64, which increase."""
    taken = SparseVector.allocate(len(positions), sparse.numel, sparse.dtype, sparse.device)
    for part, out in ((sparse.indices, taken.indices), (sparse.values, taken.values)):
        torch.index_select(part, 0, positions, out=out)
    return taken


def rising(keys: Tensor, least: int) -> Tensor:
    """The keys, int32 or int64 and not negative, that are ``least`` or larger, the smallest first; any device."""
    if keys.dtype == torch.int32 and dense.ready(keys):
        return sifting.rising(keys, least)
    few = keys.is_cpu and len(keys) < MANY
    in_order = torch.from_numpy(np.sort(keys.numpy())) if few else torch.sort(keys).values
    return in_order[torch.searchsorted(in_order, least) :]
