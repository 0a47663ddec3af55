"""Choosing entries, against plain torch."""

import pytest
import torch
from sparse_collectives.entries import where, without
from sparse_compress import topk

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
