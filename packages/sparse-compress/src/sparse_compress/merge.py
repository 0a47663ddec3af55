"""Addition of sparse vectors, exact or cut to the k largest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_compress.arguments import integer
from sparse_compress.entries import compact, pad
from sparse_compress.magnitude import Keys, bits_of, largest, magnitude_keys, magnitude_mask
from sparse_compress.native.sparse import added, every, merged
from sparse_compress.vector import SparseVector, takes

Array = NDArray[Any]


def merge(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Merges a and b into the k largest entries of a + b, and the cut: kept + cut = a + b, exactly.

    Values are added as a + b. Finite operands commute bit for bit; NaN payloads do not, so all ranks pass the
    group of lower ranks first. No scratch grows with numel.

    Args:
        a: One vector.
        b: Another of the same numel, dtype and device.
        k: Number of entries to keep, ≥ 0.

    Returns:
        (kept, cut). ``kept`` has exactly min(k, numel) entries: ties go to the lowest index, and where the union of a
        and b is smaller, explicit zeros at the lowest unused indices fill it. ``cut`` has the rest of the union; on a
        GPU, where the size of the union is not read back, it has min(len(a) + len(b), numel) − k entries (0 if
        negative), explicit zeros included.

    Raises:
        ValueError: k < 0, or numel, dtype or device of a and b differ.
    """
    k = integer(k, "k", expected="the number of entries to keep")
    _check_alike(a, b)
    k = min(k, a.numel)
    if len(a) + len(b) <= k:
        return pad(union(a, b), k), SparseVector.empty(a.numel, a.dtype, device=a.device)
    return _merge_cpu(a, b, k) if a.is_cpu else _merge_on_device(a, b, k)


def add(a: SparseVector, b: SparseVector) -> SparseVector:
    """Sum a + b with an entry wherever one of them has one, even if the values cancel.

    On a GPU it always has min(len(a) + len(b), numel) entries, explicit zeros included.

    Args:
        a: One vector.
        b: Another of the same numel, dtype and device.

    Raises:
        ValueError: numel, dtype or device differ.
    """
    _check_alike(a, b)
    return union(a, b)


def add_all(vectors: Sequence[SparseVector]) -> SparseVector:
    """Sum of one vector or more, as `add` adds two: neighbours first, then the sums of neighbours.

        add_all([a, b, c, d, e])        # ((a + b) + (c + d)) + e

    So P vectors of k entries take P·k·⌈log P⌉ entries at most, not the P²k/2 of one after the other. The order of
    addition depends on P alone, so ranks that add the same values at an index get the same bits there.

    Args:
        vectors: At least one, of the same numel, dtype and device.

    Raises:
        ValueError: There is none, or numel, dtype or device differ.
    """
    sums = list(vectors)
    if not sums:
        raise ValueError("no vectors given, expected one or more: without one, numel is not known")
    while len(sums) > 1:
        odd = sums[len(sums) & ~1 :]
        sums = [add(a, b) for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
    return sums[0]


def share(cut: SparseVector, member: int, of: int) -> SparseVector:
    """Every ``of``-th entry of a vector from position ``member`` on.

    When the ``of`` members of a group have cut the same vector, their shares make it up exactly, so that
    every entry returns to one residual and no member collects them all.

    Args:
        cut: Vector that all members have.
        member: Number of the member, from 0.
        of: Number of members.

    Raises:
        ValueError: Not 0 ≤ member < of.
    """
    member = integer(member, "member", least=None, expected="the place of one in a group")
    of = integer(of, "of", least=None, expected="the size of the group")
    if not 0 <= member < of:
        raise ValueError(f"member {member} of {of} given, expected 0 ≤ member < of")
    if of == 1 or not len(cut):
        return cut
    if takes(cut):
        return every(cut, member, of)
    part = SparseVector.allocate(len(range(member, len(cut), of)), cut.numel, cut.dtype, cut.device)
    part.indices.copy_(cut.indices[member::of])
    part.values.copy_(cut.values[member::of])
    return part


def _check_alike(a: SparseVector, b: SparseVector) -> None:
    for vector in (a, b):
        if not isinstance(vector, SparseVector):
            raise TypeError(f"{type(vector).__name__} given, expected a SparseVector: make one with topk(tensor, k)")
    if a.numel == b.numel and a.dtype == b.dtype and a.device == b.device:
        return
    for what in ("numel", "dtype", "device"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"cannot add vectors of unlike {what}: {getattr(a, what)} and {getattr(b, what)}")


def _merge_cpu(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Merges on a CPU, for k < len(a) + len(b)."""
    if k and len(a) and len(b) and takes(a):
        kept_there, cut_there = merged(a, b, k)
        if cut_there is None:
            return pad(kept_there, k), SparseVector.empty(a.numel, a.dtype, device=a.device)
        return kept_there, cut_there
    indices, values, void = paired_cpu(a, b)
    if len(indices) - len(void) <= k:
        counts = without(void, len(indices))
        return pad(picked_cpu(indices, values, counts, a.numel), k), SparseVector.empty(a.numel, a.dtype)
    kept = largest(keys_of(values, void), k)
    cut = ~kept
    cut[void] = False
    return picked_cpu(indices, values, kept, a.numel), picked_cpu(indices, values, cut, a.numel)


def keys_of(values: Array, void: Array) -> Keys:
    """Keys of values, -1 at the positions that do not count."""
    bits = bits_of(torch.from_numpy(values))
    keys: Keys = bits & magnitude_mask(bits)
    keys[void] = -1
    return keys


def _merge_on_device(a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Merges in plain torch, for k < len(a) + len(b); nothing is read back."""
    indices, values, counts = paired(a, b)
    keys = magnitude_keys(values).masked_fill(~counts, -1)
    best = torch.sort(keys, descending=True, stable=True).indices[:k]
    kept = torch.zeros_like(counts).index_fill_(0, best, True) & counts
    spare = min(len(indices), a.numel) - k
    return compact(indices, values, kept, k, a.numel), compact(indices, values, counts & ~kept, spare, a.numel)


def union(a: SparseVector, b: SparseVector) -> SparseVector:
    """Sum a + b of vectors of the same numel, dtype and device; where both have an index, a's value + b's.

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
    """Mask that is False at these positions only."""
    mask = np.ones(length, bool)
    mask[positions] = False
    return mask


def picked_cpu(indices: Array, values: Array, picked: Array, numel: int) -> SparseVector:
    """Entries where ``picked`` is True, their indices increasing."""
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
