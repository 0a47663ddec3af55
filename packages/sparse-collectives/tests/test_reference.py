"""Every algorithm against a plain NumPy version of what it returns."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from communicators import SimulatedWorld
from sparse_collectives import ALGORITHMS, sparse_allreduce
from sparse_compress import topk


def cut(x, k):
    """The k largest of a dense vector, ties to the lowest index; zeros elsewhere."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.where(np.isin(np.arange(len(x)), kept), x, np.zeros_like(x))


def gtopk_reference(inputs, k):
    """Fold the ranks beyond the power of two, then merge neighbouring groups until one is left."""
    groups = [cut(x, k) for x in inputs]
    power = 1 << (len(groups).bit_length() - 1)
    for rank in range(power, len(groups)):
        groups[rank - power] = cut(groups[rank - power] + groups[rank], k)
    del groups[power:]
    while len(groups) > 1:
        groups = [cut(low + high, k) for low, high in zip(groups[::2], groups[1::2], strict=True)]
    return groups[0]


def tree(sums):
    """Neighbours are added, then the sums of neighbours."""
    while len(sums) > 1:
        pairs = [low + high for low, high in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs if len(sums) % 2 == 0 else [*pairs, sums[-1]]
    return sums[0]


def topk_allgather_reference(inputs, k):
    """Add all selections."""
    return tree([cut(x, k) for x in inputs])


def dense_reference(inputs, k):
    """Add all selections; integers are exact in any order."""
    return np.sum([cut(x, k) for x in inputs], axis=0)


def spardl_blocks(n, k, blocks, step=0):
    """(low, high, budget) of every block that has elements."""
    edges = [b * n // blocks for b in range(blocks + 1)]
    filled = [(low, high) for low, high in pairwise(edges) if high > low]
    k, turn = min(k, n), 0 if min(k, n) >= len(filled) else step
    budgets = np.diff([(b + turn) * k // len(filled) for b in range(len(filled) + 1)])
    return [(low, high, min(budget, high - low)) for (low, high), budget in zip(filled, budgets, strict=True)]


def hops(partials, budget):
    """partials[j], of the rank j hops before a block's owner, are added up in ever shorter hops, with cuts."""
    partials = [cut(x, budget) for x in partials]
    while len(partials) > 1:
        distance = 1 << ((len(partials) - 1).bit_length() - 1)
        for j in range(distance, len(partials)):
            partials[j - distance] = cut(partials[j - distance] + partials[j], budget)
        del partials[distance:]
    return partials[0]


def spardl_reference(inputs, k, teams=1, sag="r-sag", step=0):
    """Each block is summed in each team, then over teams: pairwise, or all at once and cut."""
    selected, total = [cut(x, k) for x in inputs], np.zeros_like(inputs[0])
    ranks, n = len(inputs) // teams, len(total)
    owners = [b for b in range(ranks) if (b + 1) * n // ranks > b * n // ranks]
    for owner, (low, high, budget) in zip(owners, spardl_blocks(n, k, ranks, step), strict=True):
        parts = [x[low:high] for x in selected]
        sums = [
            hops([parts[team * ranks + (owner - j) % ranks] for j in range(ranks)], budget) for team in range(teams)
        ]
        total[low:high] = gtopk_reference(sums, budget) if sag == "r-sag" else cut(tree(sums), budget)
    return total


def oktopk_reference(inputs, k):
    """At the first call: the k largest of the sum of all selections."""
    return cut(topk_allgather_reference(inputs, k), k)


REFERENCES = {
    "dense": dense_reference,
    "topk-allgather": topk_allgather_reference,
    "topk-dsa": topk_allgather_reference,
    "gtopk": gtopk_reference,
    "oktopk": oktopk_reference,
    "spardl": spardl_reference,
    **{name: entry.reference for name, entry in ALGORITHMS.items() if entry.reference is not None},
}


def reduce(inputs, k, name, **options):
    tensors = [torch.from_numpy(x) for x in inputs]
    world = SimulatedWorld(len(inputs))
    results = world.run(lambda c: sparse_allreduce(topk(tensors[c.rank], k), c, k=k, algorithm=name, options=options))
    return [result.total.to_dense().numpy() for result in results]


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 1), (33, 5), (33, 33)])
def test_integers_with_ties(name, size, n, k):
    inputs = np.random.default_rng(size).integers(-4, 5, (size, n)).astype(np.float32)
    for total in reduce(inputs, k, name):
        np.testing.assert_array_equal(total, REFERENCES[name](inputs, k))


@pytest.mark.parametrize("name", [name for name in REFERENCES if ALGORITHMS[name].compresses])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_floats_bit_for_bit(name, dtype, size):
    inputs = np.random.default_rng(size).standard_normal((size, 101)).astype(dtype)
    inputs[:, ::7] *= np.finfo(dtype).tiny  # denormals
    for total in reduce(inputs, 50, name):
        np.testing.assert_array_equal(total, REFERENCES[name](inputs, 50))


@pytest.mark.parametrize(
    ("size", "teams", "sag"), [(4, 2, "r-sag"), (12, 4, "r-sag"), (6, 3, "b-sag"), (14, 7, "b-sag")]
)
def test_spardl_in_teams(size, teams, sag):
    inputs = np.random.default_rng(size).integers(-4, 5, (size, 33)).astype(np.float32)
    for k in (1, 2, 7, 33):
        for total in reduce(inputs, k, "spardl", teams=teams, sag=sag):
            np.testing.assert_array_equal(total, spardl_reference(inputs, k, teams, sag))
