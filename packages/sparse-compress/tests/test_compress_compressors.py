"""Every compressor: entries within the bound it states, values as they are, and its options checked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_compress import Compressor, TopK, topk

COMPRESSORS = [TopK(0.001), TopK(), TopK(0.3), TopK(1)]  # a new compressor gets the laws by being named here


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 400))
def test_laws(compressor, seed, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    sparse = compressor(x)
    assert isinstance(compressor, Compressor)
    assert len(sparse) <= compressor.entries(n) <= n
    assert bool(len(sparse)) == bool(n)
    assert torch.equal(sparse.values, x[sparse.indices.long()])


@pytest.mark.parametrize(
    ("density", "numel", "entries"),
    [
        (0.01, 0, 0),
        (0.01, 1, 1),
        (0.01, 149, 1),
        (0.01, 151, 2),
        (0.001, 10**6, 1000),
        (1, 7, 7),
        (1.0, 2**31 - 1, 2**31 - 1),
    ],
)
def test_top_k_entries(density, numel, entries):
    assert TopK(density).entries(numel) == entries


def test_top_k_is_exact():
    x = torch.randn(30, 40)
    assert torch.equal(TopK(0.05)(x).pack(), topk(x, 60).pack())


@pytest.mark.parametrize("density", [0, -0.1, 1.001, float("nan")])
def test_top_k_density(density):
    with pytest.raises(ValueError, match="0 < density ≤ 1"):
        TopK(density)
