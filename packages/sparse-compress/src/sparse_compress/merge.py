"""Addition of sparse vectors, exact or cut to the k largest."""

import operator

import numpy as np
import torch

from sparse_compress.compact import compact
from sparse_compress.magnitude import bits_of, largest, magnitude_keys, magnitude_mask
from sparse_compress.pad import pad
from sparse_compress.union import paired, paired_cpu, picked_cpu, union
from sparse_compress.vector import SparseVector


def merge(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """The k largest entries of a + b, and what was cut: kept + cut = a + b, exactly.

    ``kept`` has exactly min(k, numel) entries: ties go to the lowest index, and where the union of a and b
    is smaller, explicit zeros at the lowest unused indices fill it. ``cut`` has the rest of the union; on a GPU,
    where the size of the union is not read back, it has min(len(a) + len(b), numel) − k entries (0 if negative),
    explicit zeros included.

    Values are added as a + b. Finite operands commute bit for bit; NaN payloads do not, so all ranks name the
    group of lower ranks first. No scratch grows with numel.
    Raises ValueError for k < 0, and where numel, dtype or device of a and b differ.
    """
    k = operator.index(k)
    if k < 0:
        raise ValueError(f"k is {k}, expected the number of entries to keep, 0 or more")
    _check_alike(a, b)
    k = min(k, a.numel)
    if len(a) + len(b) <= k:
        return pad(union(a, b), k), SparseVector.empty(a.numel, a.dtype, device=a.device)
    return _merge_cpu(a, b, k) if a.device.type == "cpu" else _merge_on_device(a, b, k)


def add(a: SparseVector, b: SparseVector) -> SparseVector:
    """a + b with an entry wherever one of them has one, even if the values cancel.

    On a GPU it always has min(len(a) + len(b), numel) entries, explicit zeros included.

    Raises ValueError where numel, dtype or device of a and b differ.
    """
    _check_alike(a, b)
    return union(a, b)


def share(cut: SparseVector, member: int, of: int) -> SparseVector:
    """Every ``of``-th entry of a vector from position ``member`` on.

    When the ``of`` members of a group have cut the same vector, their shares make it up exactly, so that
    every entry returns to one residual and no member collects them all.
    Raises ValueError unless 0 ≤ member < of.
    """
    if not 0 <= member < of:
        raise ValueError(f"member {member} of {of} given, expected 0 ≤ member < of")
    return cut if of == 1 or not len(cut) else cut._take(torch.arange(len(cut), device=cut.device)[member::of])


def _check_alike(a: SparseVector, b: SparseVector) -> None:
    for what in ("numel", "dtype", "device"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"cannot add vectors of unlike {what}: {getattr(a, what)} and {getattr(b, what)}")


def _merge_cpu(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """For k < len(a) + len(b)."""
    indices, values, counts = paired_cpu(a, b)
    if np.count_nonzero(counts) <= k:
        return pad(picked_cpu(indices, values, counts, a.numel), k), SparseVector.empty(a.numel, a.dtype)
    bits = bits_of(torch.from_numpy(values))
    keys = np.where(counts, bits & magnitude_mask(bits), bits.dtype.type(-1))
    kept = largest(keys, k)
    cut = counts & ~kept
    return picked_cpu(indices, values, kept, a.numel), picked_cpu(indices, values, cut, a.numel)


def _merge_on_device(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """For k < len(a) + len(b). Plain torch; nothing is read back."""
    indices, values, counts = paired(a, b)
    keys = magnitude_keys(values).masked_fill(~counts, -1)
    best = torch.sort(keys, descending=True, stable=True).indices[:k]
    kept = torch.zeros_like(counts).index_fill_(0, best, True) & counts
    spare = min(len(indices), a.numel) - k
    return compact(indices, values, kept, k, a.numel), compact(indices, values, counts & ~kept, spare, a.numel)
