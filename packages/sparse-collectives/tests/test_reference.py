"""Every algorithm against its `reference`, a plain NumPy version of what it returns."""

import numpy as np
import pytest
import torch
from communicators import SimulatedWorld
from sparse_collectives import ALGORITHMS, SparDL, sparse_allreduce
from sparse_compress import topk

pytestmark = pytest.mark.quick

REFERENCES = {name: entry.reference for name, entry in ALGORITHMS.items()}


def reduce(inputs, k, name, **options):
    tensors = [torch.from_numpy(x) for x in inputs]
    world = SimulatedWorld(len(inputs))
    results = world.run(lambda c: sparse_allreduce(topk(tensors[c.rank], k), c, k=k, algorithm=name, options=options))
    return [result.total.to_dense().numpy() for result in results]


@pytest.mark.few(45)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 1), (33, 5), (33, 33)])
def test_integers_with_ties(name, size, n, k):
    inputs = np.random.default_rng(size).integers(-4, 5, (size, n)).astype(np.float32)
    for total in reduce(inputs, k, name):
        np.testing.assert_array_equal(total, REFERENCES[name](inputs, k))


@pytest.mark.parametrize("name", [name for name in REFERENCES if ALGORITHMS[name].selects])
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
            np.testing.assert_array_equal(total, SparDL(teams=teams, sag=sag).reference(inputs, k))
