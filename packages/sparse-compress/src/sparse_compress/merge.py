"""Addition of sparse vectors, exact or cut to the largest entries.

On a CPU compiled kernels add and cut float32; plain torch is their reference, and does the rest on any device.
"""

from collections.abc import Sequence
from ctypes import c_int64
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_compress.arguments import Bounds, check_blocks, integer
from sparse_compress.magnitude import largest, largest_on_device, magnitude_keys, positions
from sparse_compress.native.library import PER_ENTRY, PIECES, SCRATCH, kernels
from sparse_compress.vector import SparseVector
from sparse_compress.vectors import compact, joined, of_entries, pad, where

KIND = ("numel", "dtype", "device")


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
    return merge_to_budgets(a, b, [(0, a.numel)], [min(k, a.numel)])


def merge_to_budgets(
    a: SparseVector, b: SparseVector, bounds: Bounds, budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector]:
    """Merges a and b into the largest entries of each block of a + b, as many as its budget, and the cut.

    Args:
        a: One vector.
        b: Another of the same numel, dtype and device.
        bounds: [low, high) of every block of the index range in which a or b has entries, in order.
        budgets: Entries to keep of each block, at most its length; where there are several, a or b has as many in each.

    Returns:
        (kept, cut), as of `merge`.

    Raises:
        ValueError: The blocks are out of order or out of range, or a budget is not of 0 … its block's length.
    """
    check_blocks(bounds, budgets, a.numel, gaps=True)
    most = sum(budgets)
    if most and (library := kernels(a)):
        scratch = SCRATCH.of(PIECES + PER_ENTRY * (len(a) + len(b)))
        pieces = scratch.data_ptr()
        entries = library.sc_union(*a.run, *b.run, pieces)
        if entries < most:
            return pad(joined(scratch, entries, a), most), SparseVector.empty(a.numel, a.dtype, device=a.device)
        kept, cut = (SparseVector.allocate(n, a.numel, a.dtype, a.device) for n in (most, entries - most))
        blocks = c_int64 * len(budgets)
        sizes = blocks(*(high for _, high in bounds)), blocks(*budgets), len(budgets)
        if library.sc_split(pieces, *sizes, *kept.run[:2], *cut.run[:2]):
            return kept, cut
    return _merged(a, b, bounds, budgets)


def _merged(
    a: SparseVector, b: SparseVector, bounds: Bounds, budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector]:
    """Plain reference of `merge_to_budgets`."""
    most = sum(budgets)
    indices, values, counts = _paired(a, b)
    chosen = counts & _largest_of_blocks(indices, magnitude_keys(values).masked_fill(~counts, -1), bounds, budgets)
    others = max(min(len(indices), a.numel) - most, 0)
    return (
        pad(_picked(indices, values, chosen, most, a.numel), most),
        _picked(indices, values, counts & ~chosen, others, a.numel),
    )


def cut_to_budgets(sparse: SparseVector, bounds: Bounds, budgets: Sequence[int]) -> tuple[SparseVector, SparseVector]:
    """Cuts a vector to the largest entries in each block, as many as its budget: kept + cut = sparse, exactly.

    Ties go to the lowest index; a block with fewer entries is filled up with explicit zeros. On a GPU nothing is read
    back.

    Args:
        sparse: Vector.
        bounds: [low, high) of every block of the index range, in order and without gaps.
        budgets: Entries to keep of each block, at most its length.

    Returns:
        (kept, cut).

    Raises:
        ValueError: The blocks do not make up the vector, or a budget is not of 0 … its block's length.
    """
    check_blocks(bounds, budgets, sparse.numel)
    nothing = SparseVector.empty(sparse.numel, sparse.dtype, device=sparse.device)
    if sparse.is_cpu:
        lows = np.array([low for low, _ in bounds], np.int32)
        edges = [*np.searchsorted(sparse.indices.numpy(), lows).tolist(), len(sparse)]
        found = [last - first for first, last in pairwise(edges)]
        if found == list(budgets):
            return sparse, nothing
        if all(held >= budget for held, budget in zip(found, budgets, strict=True)):
            return merge_to_budgets(sparse, nothing, bounds, budgets)
    at = [torch.arange(low, low + budget, device="cpu") for (low, _), budget in zip(bounds, budgets, strict=True)]
    indices = torch.cat(at).to(sparse.device, torch.int32)
    zeros = of_entries(indices, torch.zeros(len(indices), dtype=sparse.dtype, device=sparse.device), sparse.numel)
    return merge_to_budgets(sparse, zeros, bounds, budgets)


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
    if not len(a) or not len(b):
        return a if len(a) else b
    if library := kernels(a):
        pieces = SCRATCH.of(PIECES + PER_ENTRY * (len(a) + len(b)))
        return joined(pieces, library.sc_union(*a.run, *b.run, pieces.data_ptr()), a)
    indices, values, counts = _paired(a, b)
    return _picked(indices, values, counts, min(len(indices), a.numel), a.numel)


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


def union_of(vectors: Sequence[SparseVector]) -> SparseVector:
    """`add_all` with an entry only where one of them has one; how many they are is read back from the device.

    Args:
        vectors: At least one, of the same numel, dtype and device.
    """
    total = add_all(vectors)
    if total.is_cpu:
        return total
    places = torch.searchsorted(total.indices, torch.cat([vector.indices for vector in vectors]))
    return where(total, torch.zeros_like(total.indices, dtype=torch.bool).index_fill_(0, places, True))


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
    library = kernels(cut)
    if not library:
        return of_entries(cut.indices[member::of], cut.values[member::of], cut.numel)
    part = SparseVector.allocate(len(range(member, len(cut), of)), cut.numel, cut.dtype, cut.device)
    library.sc_every(*cut.run, member, of, *part.run[:2])
    return part


def _check_alike(a: Any, b: Any) -> None:
    """Raises an error that says why two cannot be added."""
    for given in (a, b):
        if not isinstance(given, SparseVector):
            raise TypeError(f"{type(given).__name__} given, expected a SparseVector: make one with topk(tensor, k)")
    for what in KIND:
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"cannot add vectors of unlike {what}: {getattr(a, what)} and {getattr(b, what)}")


def _paired(a: SparseVector, b: SparseVector) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and values of a + b, (len(a) + len(b),), and which of them count.

    Where both vectors have an index it stands twice, the sum at the first place, and the second does not count.
    """
    indices, order = torch.sort(torch.cat([a.indices, b.indices]), stable=True)  # a's entry of a pair is first
    values = torch.cat([a.values, b.values])[order]
    counts = torch.ones_like(indices, dtype=torch.bool)
    torch.ne(indices[1:], indices[:-1], out=counts[1:])
    first = ~counts.roll(-1)
    return indices, torch.where(first, values + values.roll(-1), values), counts


def _largest_of_blocks(indices: Tensor, keys: Tensor, bounds: Bounds, budgets: Sequence[int]) -> Tensor:
    """Mask of the largest keys of each block, as many as its budget, ties to the lowest index."""
    if len(budgets) == 1:
        return largest(keys, min(budgets[0], len(keys)))
    highs, allowed = torch.tensor([[high for _, high in bounds], list(budgets)], device=keys.device)
    by_size = largest_on_device(keys, len(keys))
    block, order = torch.sort(torch.searchsorted(highs, indices[by_size].long(), right=True), stable=True)
    place = torch.arange(len(indices), device=keys.device) - torch.searchsorted(block, block)
    chosen = torch.empty_like(keys, dtype=torch.bool)
    chosen[by_size[order]] = place < allowed[block]
    return chosen


def _picked(indices: Tensor, values: Tensor, mask: Tensor, most: int, numel: int) -> SparseVector:
    """Entries that a mask picks; on a GPU, which is not asked how many, filled up to ``most`` with explicit zeros."""
    if not mask.is_cpu:
        return compact(indices, values, mask, most, numel)
    places = positions(mask)
    return of_entries(indices[places], values[places], numel)
