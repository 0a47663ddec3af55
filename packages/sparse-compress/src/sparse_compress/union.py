"""The sum of two sparse vectors over the union of their indices."""

import numpy as np
import torch

from sparse_compress.vector import SparseVector


def union(a: SparseVector, b: SparseVector) -> SparseVector:
    """a + b for vectors of the same numel, dtype and device; where both have an index, a's value + b's."""
    if not len(a) or not len(b):
        return a if len(a) else b
    return _union_cpu(a, b) if a.device.type == "cpu" else _union_on_device(a, b)


def _union_cpu(a: SparseVector, b: SparseVector) -> SparseVector:
    indices = np.concatenate([a.indices.numpy(), b.indices.numpy()])
    values = np.concatenate([a.values.numpy(), b.values.numpy()])
    order = np.argsort(indices, kind="stable")  # finds the two runs and merges them; a's entry of a pair is first
    indices, values = indices.take(order), values.take(order)
    first_of_pairs = np.flatnonzero(indices[1:] == indices[:-1])
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is for the caller to find, not a warning here
        values[first_of_pairs] += values[first_of_pairs + 1]
    kept = np.ones(len(indices), bool)
    kept[first_of_pairs + 1] = False
    positions = np.flatnonzero(kept)
    total = SparseVector._allocate(len(positions), a.numel, a.dtype, a.device)
    indices.take(positions, out=total.indices.numpy(), mode="clip")  # without a mode, take buffers its output
    values.take(positions, out=total.values.numpy(), mode="clip")
    return total


def _union_on_device(a: SparseVector, b: SparseVector) -> SparseVector:
    indices, order = torch.sort(torch.cat([a.indices, b.indices]), stable=True)
    values = torch.cat([a.values, b.values])[order]
    second = torch.zeros_like(indices, dtype=torch.bool)
    torch.eq(indices[1:], indices[:-1], out=second[1:])
    paired = second.roll(-1)
    values = torch.where(paired, values + values.roll(-1), values)
    positions = (~second).nonzero().view(-1)  # reads the size of the union back
    total = SparseVector._allocate(len(positions), a.numel, a.dtype, a.device)
    torch.index_select(indices, 0, positions, out=total.indices)
    torch.index_select(values, 0, positions, out=total.values)
    return total
