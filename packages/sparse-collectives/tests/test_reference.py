"""Every algorithm against a plain NumPy version of what it returns."""

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


def topk_allgather_reference(inputs, k):
    """Add all selections in rank order."""
    return sum((cut(x, k) for x in inputs[1:]), start=cut(inputs[0], k))


def dense_reference(inputs, k):
    """Add all selections; integers are exact in any order."""
    return np.sum([cut(x, k) for x in inputs], axis=0)


REFERENCES = {"gtopk": gtopk_reference, "topk-allgather": topk_allgather_reference, "dense": dense_reference}


def reduce(inputs, k, name):
    tensors = [torch.from_numpy(x) for x in inputs]
    world = SimulatedWorld(len(inputs))
    results = world.run(lambda c: sparse_allreduce(topk(tensors[c.rank], k), c, k=k, algorithm=name))
    return [result.total.to_dense().numpy() for result in results]


def test_every_algorithm_has_a_reference():
    assert set(REFERENCES) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 1), (33, 5), (33, 33)])
def test_integers_with_ties(name, size, n, k):
    inputs = np.random.default_rng(size).integers(-4, 5, (size, n)).astype(np.float32)
    for total in reduce(inputs, k, name):
        np.testing.assert_array_equal(total, REFERENCES[name](inputs, k))


@pytest.mark.parametrize("name", ["gtopk", "topk-allgather"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_floats_bit_for_bit(name, dtype, size):
    inputs = np.random.default_rng(size).standard_normal((size, 101)).astype(dtype)
    inputs[:, ::7] *= np.finfo(dtype).tiny  # denormals
    for total in reduce(inputs, 50, name):
        np.testing.assert_array_equal(total, REFERENCES[name](inputs, 50))
