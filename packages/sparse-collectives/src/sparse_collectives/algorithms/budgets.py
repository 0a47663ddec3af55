"""Blocks of the index range, each with a budget of entries, and the cut to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from communicators import schedules
from sparse_compress import SparseVector, add
from sparse_compress.entries import compact, where
from sparse_compress.magnitude import Keys, Mask, bits_of, largest, magnitude_keys, magnitude_mask
from sparse_compress.merge import Array, keys_of, paired, paired_cpu, picked_cpu
from sparse_compress.native.library import take
from sparse_compress.native.sparse import merged_to_budgets

from sparse_collectives.wire.entries import Bounds, assemble


def block_budgets(k: int, numel: int, blocks: int, step: int) -> list[int]:
    """Entries that each block may have: ⌊(b + 1 + o)k/T⌋ − ⌊(b + o)k/T⌋, at most its length; at most k in all.

    T: blocks that have elements, numbered b. o: 0 where k ≥ T, else the step number, so that every block gets its turn.
    """
    k, budgets = min(k, numel), [0] * blocks
    filled = [(b, high - low) for b, (low, high) in enumerate(schedules.block_bounds(numel, blocks)) if high > low]
    o = 0 if k >= len(filled) else step
    for j, (b, length) in enumerate(filled):
        budgets[b] = min((j + 1 + o) * k // len(filled) - (j + o) * k // len(filled), length)
    return budgets


def cut_to_budgets(sparse: SparseVector, bounds: Bounds, budgets: Sequence[int]) -> tuple[SparseVector, SparseVector]:
    """The largest entries in each block, as many as its budget, and what was cut: kept + cut = sparse, exactly.

    Ties go to the lowest index; a block with fewer entries is filled up with explicit zeros. All entries lie in some
    block, and no budget exceeds its block. On a GPU nothing is read back.
    """
    if not sparse.values.is_cpu:
        return _merge_on_device(sparse, _zeros(sparse, bounds, budgets), bounds, budgets)
    edges = _edges(sparse.indices.numpy(), bounds)
    if np.array_equal(np.diff(edges), budgets):
        return sparse, SparseVector.empty(sparse.numel, sparse.dtype)
    if any(last - first < budget for (first, last), budget in zip(pairwise(edges), budgets, strict=True)):
        sparse = add(sparse, _zeros(sparse, bounds, budgets))
        edges = _edges(sparse.indices.numpy(), bounds)
    bits = bits_of(sparse.values)
    selected = _selected(bits & magnitude_mask(bits), edges, budgets)
    if selected.all():
        return sparse, SparseVector.empty(sparse.numel, sparse.dtype)
    return where(sparse, torch.from_numpy(selected)), where(sparse, torch.from_numpy(~selected))


def merge_to_budgets(
    a: SparseVector, b: SparseVector, bounds: Bounds, budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector]:
    """`cut_to_budgets` of a + b, of which one at least has as many entries in each block as its budget."""
    if not a.values.is_cpu:
        return _merge_on_device(a, b, bounds, budgets)
    if take(a.values):
        compiled = merged_to_budgets(a, b, [high for _, high in bounds], budgets)
        if compiled is not None:
            return compiled
    indices, values, void = paired_cpu(a, b)
    kept = _selected(keys_of(values, void), _edges(indices, bounds), budgets)
    cut = ~kept
    cut[void] = False
    return picked_cpu(indices, values, kept, a.numel), picked_cpu(indices, values, cut, a.numel)


def _selected(keys: Keys, edges: Sequence[int], budgets: Sequence[int]) -> Mask:
    """The largest keys between two edges each."""
    selected = np.empty(len(keys), bool)
    for (first, last), budget in zip(pairwise(edges), budgets, strict=True):
        selected[first:last] = budget == last - first or largest(keys[first:last], budget)
    return selected


def _edges(indices: Array, bounds: Bounds) -> list[int]:
    """Position of each block's first entry, and the end of the last block's entries."""
    lows = np.array([low for low, _ in bounds], np.int32)
    return [*np.searchsorted(indices, lows).tolist(), len(indices)]


def _zeros(like: SparseVector, bounds: Bounds, budgets: Sequence[int]) -> SparseVector:
    """Explicit zeros at the first indices of each block, as many as its budget."""
    indices = [torch.arange(low, low + budget) for (low, _), budget in zip(bounds, budgets, strict=True)]
    at = torch.cat(indices).to(like.device, torch.int32)
    return assemble(at, torch.zeros(len(at), dtype=like.dtype, device=like.device), like.numel)


def _merge_on_device(
    a: SparseVector, b: SparseVector, bounds: Bounds, budgets: Sequence[int]
) -> tuple[SparseVector, SparseVector]:
    """Every block of a + b has its budget at least. Plain torch: sorts by magnitude, then by block, both stable."""
    indices, values, counts = paired(a, b)
    highs, allowed = torch.tensor([[high for _, high in bounds], list(budgets)], device=a.device)
    keys = magnitude_keys(values).masked_fill(~counts, -1)  # the last of their blocks
    by_size = torch.sort(keys, descending=True, stable=True).indices
    block, order = torch.sort(torch.searchsorted(highs, indices[by_size].long(), right=True), stable=True)
    place = torch.arange(len(indices), device=a.device) - torch.searchsorted(block, block)
    kept = torch.empty_like(counts)
    kept[by_size[order]] = place < allowed[block]
    spare = min(len(indices), a.numel) - sum(budgets)
    return (
        compact(indices, values, kept, sum(budgets), a.numel),
        compact(indices, values, counts & ~kept, spare, a.numel),
    )
