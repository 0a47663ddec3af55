"""What the ring returns, in plain NumPy, without messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ring_reduce_scatter.sizes import budgets_of, edges_of

Array = NDArray[np.floating]


def reference(inputs: Sequence[Array], k: int) -> Array:
    """Block b is added up from rank b on, and cut to its budget at every rank."""
    size, numel = len(inputs), len(inputs[0])
    edges, selected, total = edges_of(numel, size), [cut(x, k) for x in inputs], np.zeros_like(inputs[0])
    for b, budget in enumerate(budgets_of(numel, size, k)):
        part = slice(edges[b], edges[b + 1])
        block = cut(selected[b][part], budget)
        for hop in range(1, size):
            block = cut(block + cut(selected[(b + hop) % size][part], budget), budget)
        total[part] = block
    return total


def cut(x: Array, k: int) -> Array:
    """The k largest, ties to the lowest index; zeros elsewhere."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.where(np.isin(np.arange(len(x)), kept), x, np.zeros_like(x))
