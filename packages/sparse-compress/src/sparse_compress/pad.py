"""Explicit zeros that bring a vector to a fixed size on the wire."""

import operator

import torch

from sparse_compress.compact import compact
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
    everything = torch.ones(len(vector), dtype=torch.bool, device=vector.device)
    return compact(vector.indices, vector.values, everything, count, vector.numel)
