"""SparDL without messages: each block is summed in each team, then over teams."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sparse_collectives.algorithm import Array
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.reference import cut, tree
from sparse_collectives.algorithms.spardl_teams import is_recursive


def spardl_reference(inputs: Sequence[Array], k: int, *, teams: int, sag: str) -> Array:
    """Total of a first call. R-SAG merges the teams' sums pairwise; B-SAG adds all at once, then cuts."""
    selected, total = [cut(x, k) for x in inputs], np.zeros_like(inputs[0])
    ranks, n = len(inputs) // teams, len(total)
    owners = [b for b in range(ranks) if (b + 1) * n // ranks > b * n // ranks]
    for owner, (low, high, budget) in zip(owners, _blocks(n, k, ranks), strict=True):
        parts = [x[low:high] for x in selected]
        sums = [
            _hops([parts[team * ranks + (owner - j) % ranks] for j in range(ranks)], budget) for team in range(teams)
        ]
        total[low:high] = GTopK().reference(sums, budget) if is_recursive(teams, sag) else cut(tree(sums), budget)
    return total


def _blocks(n: int, k: int, blocks: int) -> list[tuple[int, int, int]]:
    """(low, high, budget) of every block that has elements."""
    edges = [b * n // blocks for b in range(blocks + 1)]
    filled = [(low, high) for low, high in pairwise(edges) if high > low]
    budgets = np.diff([b * min(k, n) // len(filled) for b in range(len(filled) + 1)])
    return [(low, high, min(int(budget), high - low)) for (low, high), budget in zip(filled, budgets, strict=True)]


def _hops(partials: Sequence[Array], budget: int) -> Array:
    """partials[j], of the rank j hops before a block's owner, are added up in ever shorter hops, with cuts."""
    partials = [cut(x, budget) for x in partials]
    while len(partials) > 1:
        distance = 1 << ((len(partials) - 1).bit_length() - 1)
        for j in range(distance, len(partials)):
            partials[j - distance] = cut(partials[j - distance] + partials[j], budget)
        del partials[distance:]
    return partials[0]
