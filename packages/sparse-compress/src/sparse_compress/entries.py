"""Some of the entries of a sparse vector, its entries with explicit zeros, and keys in order."""

import numpy as np
import torch
from torch import Tensor

from sparse_compress.arguments import integer
from sparse_compress.magnitude import magnitude_keys
from sparse_compress.native import sparse as compiled
from sparse_compress.native.library import ready
from sparse_compress.vector import SparseVector, takes

MANY = 1 << 15  # keys: from here on torch sorts by radix, in a quarter of the time; fewer NumPy sorts faster


def larger(sparse: SparseVector, key: int, ties: int = 0) -> SparseVector:
    """Entries whose key (magnitude as an integer) is larger, and the first ``ties`` of those equal to it.

    Works on a device too, from which their number is read back. Returns the vector itself if that is all of them.
    """
    if key < 0:
        return sparse
    if len(sparse) and takes(sparse):
        return compiled.larger(sparse, key, ties)
    keys = magnitude_keys(sparse.values)
    chosen = keys > key
    if ties:
        tied = keys == key
        chosen |= tied & (tied.cumsum(0) <= ties)
    return where(sparse, chosen)


def where(sparse: SparseVector, chosen: Tensor) -> SparseVector:
    """Entries that a mask chooses; their number is read back from the device."""
    # In NumPy a tenth of what indexing by a mask takes.
    positions = torch.from_numpy(np.flatnonzero(chosen.numpy())) if chosen.is_cpu else chosen.nonzero().view(-1)
    return sparse if len(positions) == len(sparse) else at(sparse, positions)


def without(sparse: SparseVector, other: SparseVector) -> SparseVector:
    """Entries whose index the other vector, of the same dtype, does not have. Their number is read back."""
    if not sparse.is_cpu:
        return where(sparse, ~torch.isin(sparse.indices, other.indices))
    if not len(sparse):
        return sparse
    if takes(sparse):
        return compiled.without(sparse, other)
    both = np.concatenate([sparse.indices.numpy(), other.indices.numpy()]).view(np.uint32) << 1
    both[len(sparse) :] |= 1
    both.sort(kind="stable")  # finds the two runs and merges them; an index of both stands before its odd twin
    mine = both & 1 == 0
    missing = mine.copy()
    missing[:-1] &= both[:-1] ^ 1 != both[1:]
    return at(sparse, torch.from_numpy(np.cumsum(mine).take(np.flatnonzero(missing)) - 1))


def at(sparse: SparseVector, positions: Tensor) -> SparseVector:
    """Entries at increasing positions, int64."""
    taken = SparseVector.allocate(len(positions), sparse.numel, sparse.dtype, sparse.device)
    for part, out in ((sparse.indices, taken.indices), (sparse.values, taken.values)):
        torch.index_select(part, 0, positions, out=out)
    return taken


def rising(keys: Tensor, least: int) -> Tensor:
    """Keys, int32 or int64 and not negative, that are ``least`` or larger, the smallest first; any device."""
    if keys.dtype == torch.int32 and ready(keys):
        return compiled.rising(keys, least)
    few = keys.is_cpu and len(keys) < MANY
    in_order = torch.from_numpy(np.sort(keys.numpy())) if few else torch.sort(keys).values
    return in_order[torch.searchsorted(in_order, least) :]


def pad(vector: SparseVector, count: int) -> SparseVector:
    """Pads ``vector`` to exactly ``count`` entries: explicit zeros are added at the lowest unused indices.

    Args:
        vector: Vector of fewer entries, or as many.
        count: Number of entries afterwards.

    Raises:
        ValueError: Not len(vector) ≤ count ≤ numel.
    """
    count = integer(count, "count", expected="the number of entries")
    if not len(vector) <= count <= vector.numel:
        raise ValueError(f"count is {count}, expected {len(vector)} (entries) … {vector.numel} (numel)")
    if count == len(vector):
        return vector
    if vector.values.is_cpu:
        return _pad_on_cpu(vector, count)
    everything = torch.ones(len(vector), dtype=torch.bool, device=vector.device)
    return compact(vector.indices, vector.values, everything, count, vector.numel)


def _pad_on_cpu(vector: SparseVector, count: int) -> SparseVector:
    """Pads in NumPy, and so in the calling thread."""
    indices = vector.indices.numpy()
    used = np.zeros(count, dtype=bool)  # of the lowest `count` indices enough are unused
    used[indices[: np.searchsorted(indices, count)]] = True
    zeros = np.flatnonzero(~used)[: count - len(indices)]
    places = np.searchsorted(indices, zeros) + np.arange(len(zeros))
    others = np.ones(count, dtype=bool)
    others[places] = False
    padded = SparseVector.allocate(count, vector.numel, vector.dtype, vector.device)
    all_indices, all_values = padded.indices.numpy(), padded.values.numpy()
    all_indices[places], all_values[places] = zeros, 0
    all_indices[others], all_values[others] = indices, vector.values.numpy()
    return padded


def compact(indices: Tensor, values: Tensor, picked: Tensor, count: int, numel: int) -> SparseVector:
    """Entries that are ``picked``, and explicit zeros at the lowest unused indices: exactly ``count``.

    ``indices``: int32, (m,), increasing where picked. ``picked``: bool, (m,); at most count ≤ numel are True, which
    is trusted. Plain torch on any device, deterministic; nothing is read back.
    """
    near = torch.where(picked, indices, count).clamp_(max=count).long()
    unused = picked.new_ones(count + 1).index_fill_(0, near, False)
    # Enough of the first `count` indices are unused, because at most as many are used as entries are picked. A zero is
    # at the place of its index, because all places before it are taken; an entry comes after the zeros before it.
    zeros_up_to = unused.cumsum(0).clamp_(max=count - picked.sum())
    places = torch.where(picked, picked.cumsum(0) + zeros_up_to[near], 0)  # from 1; what is not picked goes to 0
    all_indices = torch.arange(-1, count, dtype=torch.int32, device=indices.device).index_copy_(0, places, indices)
    all_values = values.new_zeros(count + 1).index_copy_(0, places, values)
    vector = SparseVector.allocate(count, numel, values.dtype, values.device)
    vector.indices.copy_(all_indices[1:])
    vector.values.copy_(all_values[1:])
    return vector
