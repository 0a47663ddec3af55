"""Sparse vectors taken apart and put together: some of the entries of one, and several vectors' entries as one.

For algorithms that cut vectors into blocks, or send parts of them: ``from sparse_compress import vectors``. What
`merge`, `add` and `share` do stands in ``merge``.
"""

from collections.abc import Sequence
from ctypes import memmove
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from sparse_compress.arguments import integer
from sparse_compress.magnitude import magnitude_keys, positions
from sparse_compress.native.library import PER_ENTRY, PIECES, SCRATCH, SLACK, kernels
from sparse_compress.vector import SparseVector
from sparse_compress.vector import check_entries as check_entries


def of_entries(indices: Tensor, values: Tensor, numel: int) -> SparseVector:
    """``SparseVector(indices, values, numel)``, trusted to be one, so that nothing is read back from a GPU.

    Args:
        indices: int32, (k,), strictly increasing, each in [0, numel).
        values: (k,), float32 or float64.
        numel: Elements of the whole vector.
    """
    return of_parts([(indices, values)], numel)


def of_parts(parts: Sequence[tuple[Tensor, Tensor]], numel: int) -> SparseVector:
    """Vector of (indices, values), one after the other, as of `of_entries`."""
    like, entries = parts[0][1], sum(len(indices) for indices, _ in parts)
    sparse = SparseVector.allocate(entries, numel, like.dtype, like.device)
    torch.cat([indices for indices, _ in parts], out=sparse.indices)
    torch.cat([values for _, values in parts], out=sparse.values)
    return sparse


def where(sparse: SparseVector, chosen: Tensor) -> SparseVector:
    """Entries that a mask chooses; their number is read back from the device.

    Args:
        sparse: Vector.
        chosen: bool, (k,).
    """
    places = positions(chosen)
    if len(places) == len(sparse):
        return sparse
    return of_entries(sparse.indices[places], sparse.values[places], sparse.numel)


def larger(sparse: SparseVector, key: int, ties: int = 0) -> SparseVector:
    """Entries whose magnitude's key is larger, and the first ``ties`` of those equal to it.

    Works on a device too, from which their number is read back. Returns the vector itself if that is all of them.

    Args:
        sparse: Vector.
        key: Magnitude as an integer (`magnitude_keys`).
        ties: Number of entries with that very key.
    """
    if key < 0:
        return sparse
    if len(sparse) and (library := kernels(sparse)):
        room = len(sparse) + SLACK
        scratch = SCRATCH.of(16 * room)
        indices = scratch.data_ptr()
        values, others = indices + 4 * room, indices + 8 * room
        count = library.sc_filter(*sparse.run, key, ties, indices, values, others)
        return sparse if count == len(sparse) else copied_runs([(indices, values, count)], sparse)
    keys = magnitude_keys(sparse.values)
    tied = keys == key
    return where(sparse, (keys > key) | (tied & (tied.cumsum(0) <= ties)))


def without(sparse: SparseVector, other: SparseVector) -> SparseVector:
    """Entries whose index the other vector does not have; their number is read back from the device.

    Args:
        sparse: Vector.
        other: Another of the same dtype.
    """
    if len(sparse) and (library := kernels(sparse)):
        pieces = SCRATCH.of(PIECES + PER_ENTRY * (len(sparse) + len(other)))
        entries = library.sc_without(*sparse.run, other.run[0], len(other), pieces.data_ptr())
        return joined(pieces, entries, sparse)
    return where(sparse, ~torch.isin(sparse.indices, other.indices))


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
    picked = torch.ones_like(vector.indices, dtype=torch.bool)
    return compact(vector.indices, vector.values, picked, count, vector.numel)


def compact(indices: Tensor, values: Tensor, picked: Tensor, count: int, numel: int) -> SparseVector:
    """Entries that are ``picked``, and explicit zeros at the lowest unused indices: exactly ``count``.

    Plain torch on any device, deterministic; nothing is read back.

    Args:
        indices: int32, (m,), increasing where picked.
        values: (m,).
        picked: bool, (m,); at most count ≤ numel are True, which is trusted.
        count: Number of entries.
        numel: Elements of the whole vector.
    """
    near = torch.where(picked, indices, count).clamp_(max=count).long()
    unused = picked.new_ones(count + 1).index_fill_(0, near, False)
    # Enough of the first `count` indices are unused, because at most as many are used as entries are picked. A zero is
    # at the place of its index, because all places before it are taken; an entry comes after the zeros before it.
    zeros_up_to = unused.cumsum(0).clamp_(max=count - picked.sum())
    places = torch.where(picked, picked.cumsum(0) + zeros_up_to[near], 0)  # from 1; what is not picked goes to 0
    all_indices = torch.arange(-1, count, dtype=torch.int32, device=indices.device).index_copy_(0, places, indices)
    all_values = values.new_zeros(count + 1).index_copy_(0, places, values)
    return of_entries(all_indices[1:], all_values[1:], numel)


def take(sparse: SparseVector, runs: Sequence[slice]) -> SparseVector:
    """Entries at these positions, in this order.

    Args:
        sparse: Vector.
        runs: Positions from … to, increasing.
    """
    if sparse.is_cpu:
        (indices, values, _), width = sparse.run, sparse.dtype.itemsize
        return copied_runs([(indices + 4 * r.start, values + width * r.start, r.stop - r.start) for r in runs], sparse)
    return of_parts([(sparse.indices[run], sparse.values[run]) for run in runs], sparse.numel)


def split(sparse: SparseVector, bounds: Sequence[tuple[int, int]]) -> list[SparseVector]:
    """Entries in each block; how many they are is read back from the device.

    Args:
        sparse: Vector.
        bounds: [low, high) of every block of the index range, in order and without gaps.
    """
    edges = torch.tensor([low for low, _ in bounds] + [bounds[-1][1]], dtype=torch.int32, device="cpu")
    if sparse.is_cpu:
        places = np.searchsorted(sparse.indices.numpy(), edges.numpy()).tolist()
    else:
        places = torch.searchsorted(sparse.indices, edges.to(sparse.device)).tolist()
    return [take(sparse, [slice(*run)]) for run in pairwise(places)]


def join(vectors: Sequence[SparseVector]) -> SparseVector:
    """Entries of all vectors in one.

    Args:
        vectors: At least one; each has higher indices than the one before.
    """
    like = vectors[0]
    if like.is_cpu:
        return copied_runs([vector.run for vector in vectors], like)
    return of_parts([(vector.indices, vector.values) for vector in vectors], like.numel)


def concatenate(vectors: Sequence[SparseVector]) -> SparseVector:
    """Concatenates the vectors of consecutive parts into one vector of the whole.

    Args:
        vectors: At least one, of one dtype and device.
    """
    starts = [0, *accumulate(vector.numel for vector in vectors)]
    parts = [(vector.indices + start, vector.values) for vector, start in zip(vectors, starts, strict=False)]
    return of_parts(parts, starts[-1])


def copied_runs(runs: Sequence[tuple[int, int, int]], like: SparseVector) -> SparseVector:
    """Vector on a CPU of runs of entries, which the C library copies in a tenth of torch's time.

    Args:
        runs: Address of the indices, address of the values, and number of entries of each.
        like: Vector of its numel and dtype.
    """
    vector = SparseVector.allocate(sum(count for *_, count in runs), like.numel, like.dtype, like.device)
    (indices, values, _), width = vector.run, vector.dtype.itemsize
    for from_indices, from_values, count in runs:
        memmove(indices, from_indices, 4 * count)
        memmove(values, from_values, width * count)
        indices, values = indices + 4 * count, values + width * count
    return vector


def joined(pieces: Tensor, entries: int, like: SparseVector) -> SparseVector:
    """Vector of the entries that a kernel has left in pieces."""
    vector = SparseVector.allocate(entries, like.numel, like.dtype, like.device)
    kernels().sc_join(pieces.data_ptr(), *vector.run[:2])
    return vector
