"""Choosing entries, against plain torch."""

import pytest
import torch
from sparse_collectives.at_least import at_least
from sparse_collectives.entries import where, without
from sparse_compress import topk
from sparse_compress.magnitude import magnitude_keys

SIZES = [1, 2, 63, 4097, 70_001]


def integers(numel, seed=0):
    """With zeros and many ties."""
    return torch.randint(-5, 6, (numel,), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_where_and_without(numel, share):
    sparse, other = topk(integers(numel), (numel + 1) // 2), topk(integers(numel, 1), round(share * numel))
    chosen = sparse.values > 0
    positive = where(sparse, chosen)
    assert torch.equal(positive.indices, sparse.indices[chosen])
    assert torch.equal(positive.values, sparse.values[chosen])
    rest = without(sparse, other)
    missing = ~torch.isin(sparse.indices, other.indices)
    assert torch.equal(rest.indices, sparse.indices[missing])
    assert torch.equal(rest.values, sparse.values[missing])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("least", [0.0, 2.0, 5.0, 6.0, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_least(numel, least, dtype):
    x = integers(numel).to(dtype)
    x[numel // 2] = torch.nan
    key = int(magnitude_keys(torch.tensor(least, dtype=dtype)))
    reaching = (magnitude_keys(x) >= key).nonzero().view(-1)
    for k in (1, (numel + 3) // 4, numel):
        found = at_least(x, key, k)
        expected = topk(x, k).indices if len(reaching) > k else reaching.int()
        assert torch.equal(found.indices, expected)
        assert torch.equal(found.values.isnan(), x[found.indices].isnan())
        assert torch.equal(found.values.nan_to_num(), x[found.indices].nan_to_num())
