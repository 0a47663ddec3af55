"""Explicit zeros that bring a vector to a fixed size on the wire."""

import operator

import torch

from sparse_compress.union import union
from sparse_compress.vector import SparseVector


def pad(vector: SparseVector, count: int) -> SparseVector:
    """``vector`` with exactly ``count`` entries: explicit zeros are added at the lowest unused indices.

    Raises ValueError unless len(vector) ≤ count ≤ numel.
    """
    count = operator.index(count)
    if not len(vector) <= count <= vector.numel:
        raise ValueError(f"count is {count}, expected {len(vector)} (entries) … {vector.numel} (numel)")
    if count == len(vector):
        return vector
    zeros = SparseVector._allocate(count - len(vector), vector.numel, vector.dtype, vector.device)
    zeros.values.zero_()
    # Of the first `count` indices at most len(vector) are used, so enough unused ones lie among them.
    used = torch.zeros(count + 1, dtype=torch.bool, device=vector.device)
    used[vector.indices.clamp(max=count).long()] = True
    unused_first = torch.sort(used[:count], stable=True).indices
    zeros.indices.copy_(unused_first[: len(zeros)])
    return union(vector, zeros)
