"""Sparse vectors by the kernels: sums of two, one without the other, some of the entries, keys in order."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_compress.native.library import SCRATCH, kernels
from sparse_compress.vector import SparseVector

PIECES_BYTES = 64  # where each of four pieces begins and ends
SLACK = 64  # entries that a kernel may write beyond the last one


def merged(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector | None]:
    """Merges into the k largest of a + b, 0 < k, and the others; the whole union and None where it has at most k."""
    union = _union(a, b)
    if union.entries <= k:
        return _joined(union, a), None
    parted = _parted(union, a, [a.numel], [k])
    assert parted is not None
    return parted


def merged_to_budgets(
    a: SparseVector, b: SparseVector, highs: Sequence[int], budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector] | None:
    """Merges into the largest of every block of a + b, as its budget says, and the others; None if a block has fewer.

    highs: ends of the blocks, in order.
    """
    return _parted(_union(a, b), a, highs, budgets)


def added(a: SparseVector, b: SparseVector) -> SparseVector:
    """Sum a + b over the union of their indices."""
    return _joined(_union(a, b), a)


def without(a: SparseVector, b: SparseVector) -> SparseVector:
    """Entries of a whose index b does not have."""
    pieces, indices, values, _ = _room(a, b)
    entries = kernels().sc_without(*a.addresses, len(a), b.addresses[0], len(b), indices, values, pieces)
    return _joined(_Pieces(pieces, indices, values, entries), a)


def every(a: SparseVector, first: int, step: int) -> SparseVector:
    """Every ``step``-th entry from position ``first`` on."""
    taken = SparseVector.allocate(len(range(first, len(a), step)), a.numel, a.dtype, a.device)
    kernels().sc_every(*a.addresses, len(a), first, step, *taken.addresses)
    return taken


class _Pieces(NamedTuple):
    """Entries in pieces, in scratch memory: the addresses of pieces, indices and values, and the number of entries.

    spare: address of as much memory as the values take.
    """

    pieces: int
    indices: int
    values: int
    entries: int
    spare: int = 0


def _room(a: SparseVector, b: SparseVector) -> tuple[int, int, int, int]:
    """Addresses for pieces, indices and values, and of as much memory as one of them takes."""
    most = len(a) + len(b) + 64
    pieces = SCRATCH.of(PIECES_BYTES + 12 * most)
    indices = pieces + PIECES_BYTES
    return pieces, indices, indices + 4 * most, indices + 8 * most


def _union(a: SparseVector, b: SparseVector) -> _Pieces:
    pieces, indices, values, spare = _room(a, b)
    entries = kernels().sc_union(*a.addresses, len(a), *b.addresses, len(b), indices, values, pieces)
    return _Pieces(pieces, indices, values, entries, spare)


def _joined(found: _Pieces, like: SparseVector) -> SparseVector:
    vector = SparseVector.allocate(found.entries, like.numel, like.dtype, like.device)
    kernels().sc_join(found.indices, found.values, found.pieces, *vector.addresses)
    SCRATCH.trim()
    return vector


def _parted(
    union: _Pieces, like: SparseVector, highs: Sequence[int], budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector] | None:
    most, blocks = sum(budgets), len(budgets)
    if union.entries < most:
        return None
    kept = SparseVector.allocate(most, like.numel, like.dtype, like.device)
    cut = SparseVector.allocate(union.entries - most, like.numel, like.dtype, like.device)
    sizes = (c_int64 * blocks)(*highs), (c_int64 * blocks)(*budgets), blocks
    ends = *kept.addresses, *cut.addresses
    done = kernels().sc_split(union.indices, union.values, union.pieces, *sizes, *ends, union.spare)
    SCRATCH.trim()
    return (kept, cut) if done else None


def larger(sparse: SparseVector, key: int, ties: int) -> SparseVector:
    """Entries whose key is larger than ``key``, which is 0 or more, and the first ``ties`` of those equal to it.

    Returns the vector itself if that is all of them.
    """
    n = len(sparse)
    room = n + SLACK
    indices = SCRATCH.of(16 * room)
    values, others = indices + 4 * room, indices + 8 * room
    count = kernels().sc_filter(*sparse.addresses, n, key, ties, indices, values, others)
    return sparse if count == n else copied(indices, values, count, sparse.numel)


def rising(keys: Tensor, least: int) -> Tensor:
    """Keys, int32, that are ``least`` or larger, the smallest first."""
    room = len(keys) + SLACK
    sorted_ = torch.empty(room, dtype=torch.int32)
    count = kernels().sc_sorted(keys.data_ptr(), len(keys), least, sorted_.data_ptr(), SCRATCH.of(4 * room))
    SCRATCH.trim()
    return sorted_[:count]


def copied(indices: int, values: int, count: int, numel: int) -> SparseVector:
    """Vector of float32 entries copied from these addresses, which may then be overwritten."""
    vector = SparseVector.allocate(count, numel, torch.float32, torch.device("cpu"))
    for to, source in zip(vector.addresses, (indices, values), strict=True):
        ctypes.memmove(to, source, 4 * count)
    SCRATCH.trim()
    return vector
