"""The sum of two sparse vectors over the union of their indices."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_compress.compact import compact
from sparse_compress.native.adding import added
from sparse_compress.native.dense import takes
from sparse_compress.vector import SparseVector

Array = NDArray[Any]


def union(a: SparseVector, b: SparseVector) -> SparseVector:
    """a + b for vectors of the same numel, dtype and device; where both have an index, a's value + b's.

    On a CPU exactly the union of their entries; elsewhere min(len(a) + len(b), numel) of them, explicit zeros
    included, so that nothing needs to be read back.
    """
    if not len(a) or not len(b):
        return a if len(a) else b
    return _union_cpu(a, b) if a.is_cpu else _union_on_device(a, b)


def paired_cpu(a: SparseVector, b: SparseVector) -> tuple[Array, Array, Array]:
    """Indices and values of a + b, (len(a) + len(b),), and the positions that do not count.

    Where both vectors have an index it stands twice, the sum at the first place, and the second does not count.
    """
    indices = np.concatenate([a.indices.numpy(), b.indices.numpy()])
    values = np.concatenate([a.values.numpy(), b.values.numpy()])
    order = np.argsort(indices, kind="stable")  # finds the two runs and merges them; a's entry of a pair is first
    indices, values = indices.take(order), values.take(order)
    first_of_pairs = np.flatnonzero(indices[1:] == indices[:-1])
    with np.errstate(all="ignore"):  # overflow is for the caller to find, not a warning here
        values[first_of_pairs] += values[first_of_pairs + 1]
    return indices, values, first_of_pairs + 1


def without(positions: Array, length: int) -> Array:
    """A mask that is False at these positions only."""
    mask = np.ones(length, bool)
    mask[positions] = False
    return mask


def picked_cpu(indices: Array, values: Array, picked: Array, numel: int) -> SparseVector:
    """The entries where ``picked`` is True, their indices increasing."""
    positions = np.flatnonzero(picked)
    vector = SparseVector.allocate(len(positions), numel, torch.from_numpy(values).dtype, torch.device("cpu"))
    indices.take(positions, out=vector.indices.numpy(), mode="clip")  # without a mode, take buffers its output
    values.take(positions, out=vector.values.numpy(), mode="clip")
    return vector


def _union_cpu(a: SparseVector, b: SparseVector) -> SparseVector:
    if takes(a):
        return added(a, b)
    indices, values, void = paired_cpu(a, b)
    return picked_cpu(indices, values, without(void, len(indices)), a.numel)


def paired(a: SparseVector, b: SparseVector) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and values of a + b, (len(a) + len(b),), and which of them count.

    Where both vectors have an index it stands twice, the sum at the first place, and the second does not count.
    Plain torch on any device; nothing is read back.
    """
    indices, order = torch.sort(torch.cat([a.indices, b.indices]), stable=True)  # a's entry of a pair is first
    values = torch.cat([a.values, b.values])[order]
    counts = torch.ones_like(indices, dtype=torch.bool)
    torch.ne(indices[1:], indices[:-1], out=counts[1:])
    first = ~counts.roll(-1)
    return indices, torch.where(first, values + values.roll(-1), values), counts


def _union_on_device(a: SparseVector, b: SparseVector) -> SparseVector:
    indices, values, counts = paired(a, b)
    return compact(indices, values, counts, min(len(indices), a.numel), a.numel)
