"""Runs of a sparse vector's entries, and the bytes that they travel as.

On the wire they are a body: the values, then the int32 indices, without a header; the receiver knows numel and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sparse_compress import SparseVector, vectors
from sparse_compress.vector import check_entries, is_increasing
from sparse_compress.vector_format import entry_nbytes
from torch import Tensor

from sparse_collectives.wire.invalid import InvalidMessageError

Bounds = Sequence[tuple[int, int]]
"""[low, high) of every block of the index range, in order and without gaps."""


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
    return vectors.join([part for _, part in parts])


def join_bodies(
    bodies: Sequence[Tensor], spans: Bounds, counts: Sequence[int], like: SparseVector
) -> SparseVector | None:
    """`join` of bodies on a CPU, straight from their bytes; None where one has not that many entries in its span.

    Nor where indices do not increase from body to body.
    """
    width, entry = like.dtype.itemsize, entry_nbytes(like.dtype)
    if any(body.numel() != count * entry for body, count in zip(bodies, counts, strict=True)):
        return None
    starts = [body.data_ptr() for body in bodies]
    joined = vectors.copied_runs(
        [(at + width * count, at, count) for at, count in zip(starts, counts, strict=True)], like
    )
    indices, last = joined.indices.numpy(), 0
    for (low, high), count in zip(spans, counts, strict=True):
        first, last = last, last + count
        if count and not low <= indices[first] <= indices[last - 1] < high:
            return None
    return joined if is_increasing(joined.indices) else None
