"""Explicit zeros that bring a vector to a fixed size on the wire."""

import numpy as np
import torch

from sparse_compress.arguments import integer
from sparse_compress.compact import compact
from sparse_compress.vector import SparseVector


def pad(vector: SparseVector, count: int) -> SparseVector:
    """``vector`` with exactly ``count`` entries: explicit zeros are added at the lowest unused indices.

    Args:
        vector: Of fewer entries, or as many.
        count: How many it has afterwards.

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
    """In NumPy, and so in the calling thread."""
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
