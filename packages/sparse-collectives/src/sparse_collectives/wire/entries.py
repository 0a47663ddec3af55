"""Runs of a sparse vector's entries, and the bytes that they travel as.

On the wire they are a body: the values, then the int32 indices, without a header; the receiver knows numel and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from sparse_compress import SparseVector, add_all
from sparse_compress.order import check_indices
from sparse_compress.sift import where
from sparse_compress.vector_format import entry_nbytes
from torch import Tensor

from sparse_collectives.wire.invalid import InvalidMessageError

Bounds = Sequence[tuple[int, int]]
"""[low, high) of every block of the index range, in order and without gaps."""


def assemble(indices: Tensor, values: Tensor, numel: int) -> SparseVector:
    """SparseVector(indices, values, numel), trusted, so that nothing is read back from a GPU."""
    sparse = SparseVector.allocate(len(indices), numel, values.dtype, values.device)
    sparse.indices.copy_(indices)
    sparse.values.copy_(values)
    return sparse


def take(sparse: SparseVector, runs: Sequence[slice]) -> SparseVector:
    """The entries at these positions, in this order."""
    entries = sum(run.stop - run.start for run in runs)
    taken = SparseVector.allocate(entries, sparse.numel, sparse.dtype, sparse.device)
    for part, out in ((sparse.indices, taken.indices), (sparse.values, taken.values)):
        torch.cat([part[run] for run in runs], out=out)
    return taken


def union_of(vectors: Sequence[SparseVector]) -> SparseVector:
    """`add_all` with an entry only where one of them has one. How many they are is read back from the device."""
    total = add_all(vectors)
    if total.values.is_cpu:
        return total
    places = torch.searchsorted(total.indices, torch.cat([vector.indices for vector in vectors]))
    return where(total, torch.zeros_like(total.indices, dtype=torch.bool).index_fill_(0, places, True))


def split(sparse: SparseVector, bounds: Bounds) -> list[SparseVector]:
    """The entries in each block. How many they are is read back from the device."""
    edges = torch.tensor([low for low, _ in bounds] + [bounds[-1][1]], dtype=torch.int32, device=sparse.device)
    places = torch.searchsorted(sparse.indices, edges).tolist()
    return [take(sparse, [slice(*run)]) for run in pairwise(places)]


def body_nbytes(entries: int, dtype: torch.dtype) -> int:
    """Bytes of a body: 8 an entry, float64 12."""
    return entries * entry_nbytes(dtype)


def from_body(body: Tensor, span: tuple[int, int], like: SparseVector) -> SparseVector:
    """The vector with these entries, of the numel and dtype of `like`. Copies, so that it is aligned and packed.

    Raises ValueError for no whole number of entries, and on a CPU for indices that do not increase within the span; a
    GPU is not asked.
    """
    entries, rest = divmod(body.numel(), entry_nbytes(like.dtype))
    if rest:
        raise ValueError(f"{body.numel()} bytes are no whole number of {like.dtype} entries")
    sparse = SparseVector.allocate(entries, like.numel, like.dtype, body.device)
    sparse.body.copy_(body)
    if body.is_cpu:
        check_indices(sparse.indices, *span)
    return sparse


def join_in_order(parts: Sequence[tuple[int, SparseVector]]) -> SparseVector:
    """`join` of what ranks have given, with each of them.

    Raises InvalidMessageError where indices do not increase from rank to rank, on a CPU.
    """
    last = -1
    for rank, part in parts:
        if part.values.is_cpu and len(part):
            indices = part.indices.numpy()
            if indices[0] <= last:
                raise InvalidMessageError(rank, f"index {indices[0]} comes after {last} of a rank before")
            last = int(indices[-1])
    return join([part for _, part in parts])


def join(vectors: Sequence[SparseVector]) -> SparseVector:
    """The entries of all of them; each has higher indices than the one before."""
    joined = SparseVector.allocate(sum(map(len, vectors)), vectors[0].numel, vectors[0].dtype, vectors[0].device)
    torch.cat([vector.indices for vector in vectors], out=joined.indices)
    torch.cat([vector.values for vector in vectors], out=joined.values)
    return joined
