"""Choosing entries, against plain torch."""

import pytest
import torch
from communicators import schedules
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives.algorithms.spardl_blocks import block_budgets
from sparse_compress import SparseVector, add, cut_to_budgets, merge_to_budgets, topk
from sparse_compress.vectors import where, without

pytestmark = pytest.mark.quick

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


@given(seed=st.integers(0, 99), numel=st.integers(1, 90), blocks=st.integers(1, 5), data=st.data())
def test_merging_to_budgets_is_adding_and_cutting(seed, numel, blocks, data):
    """Some blocks of a range, as a rank of SparDL holds them; one of the two has the budgets, the other anything."""
    bounds, k = schedules.block_bounds(numel, blocks), data.draw(st.integers(1, numel))
    budgets = block_budgets(k, numel, blocks, seed)
    mine, _ = cut_to_budgets(topk(integers(numel, seed), k), bounds, budgets)
    theirs = topk(integers(numel, seed + 1), data.draw(st.integers(0, numel)))
    for a, b in ((mine, theirs), (theirs, mine)):
        merged, cut = merge_to_budgets(a, b, bounds, budgets)
        expected, rest = cut_to_budgets(add(a, b), bounds, budgets)
        assert torch.equal(merged.pack(), expected.pack())
        assert torch.equal(cut.pack(), rest.pack())


def test_a_selection_that_fits_its_budgets_is_not_copied():
    sparse = SparseVector(torch.tensor([1, 4, 7], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]), 9)
    kept, cut = cut_to_budgets(sparse, [(0, 4), (4, 9)], [1, 2])
    assert kept is sparse
    assert not len(cut)
