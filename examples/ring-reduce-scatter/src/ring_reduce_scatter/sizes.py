"""Where the ring's blocks lie, and how many entries each has: n, P and k decide, so every rank knows."""

from __future__ import annotations

from itertools import pairwise


def edges_of(numel: int, size: int) -> list[int]:
    """Block b is [edges[b], edges[b + 1])."""
    return [b * numel // size for b in range(size + 1)]


def budgets_of(numel: int, size: int, k: int) -> list[int]:
    """Entries of every block, which n, P and k decide: so every rank knows what it will receive."""
    return [min(-(-k // size), high - low) for low, high in pairwise(edges_of(numel, size))]
