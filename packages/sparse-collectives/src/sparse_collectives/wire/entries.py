"""Runs of a sparse vector's entries, and the bytes that they travel as.

On the wire they are a body: the values, then the int32 indices, without a header; the receiver knows numel and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import memmove
from itertools import pairwise

import numpy as np
import torch
from sparse_compress import SparseVector, add_all
from sparse_compress.entries import where
from sparse_compress.vector import check_entries, is_increasing
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
    if sparse.device.type == "cpu":
        (indices, values), width = sparse.addresses, sparse.dtype.itemsize
        _fill(taken, [(indices + 4 * r.start, values + width * r.start, r.stop - r.start) for r in runs])
        return taken
    for part, out in ((sparse.indices, taken.indices), (sparse.values, taken.values)):
        torch.cat([part[run] for run in runs], out=out)
    return taken


def _fill(vector: SparseVector, sources: Iterable[tuple[int, int, int]]) -> None:
    """A vector on a CPU by runs of entries: the addresses of their indices and values, and how many they are.

    By the C library: a tenth of what torch takes for a few thousand.
    """
    (indices, values), width = vector.addresses, vector.dtype.itemsize
    for from_indices, from_values, count in sources:
        memmove(indices, from_indices, 4 * count)
        memmove(values, from_values, width * count)
        indices, values = indices + 4 * count, values + width * count


def union_of(vectors: Sequence[SparseVector]) -> SparseVector:
    """`add_all` with an entry only where one of them has one. How many they are is read back from the device."""
    total = add_all(vectors)
    if total.values.is_cpu:
        return total
    places = torch.searchsorted(total.indices, torch.cat([vector.indices for vector in vectors]))
    return where(total, torch.zeros_like(total.indices, dtype=torch.bool).index_fill_(0, places, True))


def split(sparse: SparseVector, bounds: Bounds) -> list[SparseVector]:
    """The entries in each block. How many they are is read back from the device."""
    lows = [low for low, _ in bounds] + [bounds[-1][1]]
    if sparse.device.type == "cpu":
        places = np.searchsorted(sparse.indices.numpy(), np.array(lows, np.int32)).tolist()
    else:
        edges = torch.tensor(lows, dtype=torch.int32, device=sparse.device)
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
        check_entries(sparse, *span)
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
    if joined.device.type == "cpu":
        _fill(joined, [(*vector.addresses, len(vector)) for vector in vectors])
        return joined
    torch.cat([vector.indices for vector in vectors], out=joined.indices)
    torch.cat([vector.values for vector in vectors], out=joined.values)
    return joined


def join_bodies(
    bodies: Sequence[Tensor], spans: Bounds, counts: Sequence[int], like: SparseVector
) -> SparseVector | None:
    """`join` of bodies on a CPU, straight from their bytes; None where one has not that many entries in its span.

    Nor where indices do not increase from body to body.
    """
    width, entry = like.dtype.itemsize, entry_nbytes(like.dtype)
    if any(body.numel() != count * entry for body, count in zip(bodies, counts, strict=True)):
        return None
    joined = SparseVector.allocate(sum(counts), like.numel, like.dtype, like.device)
    starts = [body.data_ptr() for body in bodies]
    _fill(joined, [(at + width * count, at, count) for at, count in zip(starts, counts, strict=True)])
    indices, last = joined.indices.numpy(), 0
    for (low, high), count in zip(spans, counts, strict=True):
        first, last = last, last + count
        if count and not low <= indices[first] <= indices[last - 1] < high:
            return None
    return joined if is_increasing(joined.indices) else None
