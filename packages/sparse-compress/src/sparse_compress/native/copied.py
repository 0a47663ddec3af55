"""A vector of what lies in scratch memory."""

import ctypes

import torch

from sparse_compress.native.scratch import SCRATCH
from sparse_compress.vector import SparseVector


def copied(indices: int, values: int, count: int, numel: int) -> SparseVector:
    """float32 entries at these addresses, which may then be written over."""
    vector = SparseVector.allocate(count, numel, torch.float32, torch.device("cpu"))
    for to, source in zip(vector.addresses, (indices, values), strict=True):
        ctypes.memmove(to, source, 4 * count)
    SCRATCH.trim()
    return vector
