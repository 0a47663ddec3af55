"""Addition of sparse vectors, exact or cut to the k largest."""

import operator

import numpy as np
import torch
from torch import Tensor

from sparse_compress.magnitude import bits_of, largest, largest_on_device, magnitude_mask
from sparse_compress.pad import pad
from sparse_compress.union import union
from sparse_compress.vector import SparseVector


def merge(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """The k largest entries of a + b, and what was cut: kept + cut = a + b, exactly.

    ``kept`` has exactly min(k, numel) entries: ties go to the lowest index, and where the union of a and b
    is smaller, explicit zeros at the lowest unused indices fill it. ``cut`` has the rest of the union.

    Values are added as a + b. Finite operands commute bit for bit; NaN payloads do not, so all ranks name the
    group of lower ranks first. No scratch grows with numel. On a GPU the size of the union is read back.
    Raises ValueError for k < 0, and where numel, dtype or device of a and b differ.
    """
    k = operator.index(k)
    if k < 0:
        raise ValueError(f"k is {k}, expected the number of entries to keep, 0 or more")
    total = add(a, b)
    k = min(k, total.numel)
    if len(total) <= k:
        return pad(total, k), SparseVector.empty(total.numel, total.dtype, device=total.device)
    kept, rest = _split(total.values, k)
    return total._take(kept), total._take(rest)


def add(a: SparseVector, b: SparseVector) -> SparseVector:
    """a + b with an entry wherever one of them has one, even if the values cancel.

    Raises ValueError where numel, dtype or device of a and b differ.
    """
    for what in ("numel", "dtype", "device"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"cannot add vectors of unlike {what}: {getattr(a, what)} and {getattr(b, what)}")
    return union(a, b)


def share(cut: SparseVector, member: int, of: int) -> SparseVector:
    """Every ``of``-th entry of a vector from position ``member`` on.

    When the ``of`` members of a group have cut the same vector, their shares make it up exactly, so that
    every entry returns to one residual and no member collects them all.
    Raises ValueError unless 0 ≤ member < of.
    """
    if not 0 <= member < of:
        raise ValueError(f"member {member} of {of} given, expected 0 ≤ member < of")
    return cut._take(torch.arange(len(cut), device=cut.device)[member::of])


def _split(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions of the k largest of more than k values, and of the others, both increasing."""
    if values.is_cpu:
        bits = bits_of(values)
        selected = largest(bits & magnitude_mask(bits), k)
        return torch.from_numpy(np.flatnonzero(selected)), torch.from_numpy(np.flatnonzero(~selected))
    kept = largest_on_device(values, k)
    others = torch.ones(len(values), dtype=torch.bool, device=values.device)
    others[kept] = False
    return kept, others.nonzero().view(-1)
