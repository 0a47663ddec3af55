"""Top-kDSA: exact on ties and zeros, dense where that is less, and its bytes."""

import numpy as np
import pytest
import torch
from communicators import SimulatedWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import WIRES, TopKDSA, sparse_allreduce
from sparse_collectives.algorithms.topk_dsa import topk_dsa_traffic
from sparse_compress import topk

pytestmark = pytest.mark.quick


def dsa(vectors, k, wire="fp32"):
    world = SimulatedWorld(len(vectors))
    return world.run(lambda c: sparse_allreduce(vectors[c.rank], c, k=k, algorithm="topk-dsa", wire=wire)), world


def counted(vectors, rank):
    """Entries that this rank gives to each block, and those of every block's sum."""
    size, numel = len(vectors), vectors[0].numel
    edges = [b * numel // size for b in range(size + 1)]
    union = np.unique(np.concatenate([v.indices.numpy() for v in vectors]))
    return (np.diff(np.searchsorted(indices, edges)).tolist() for indices in (vectors[rank].indices.numpy(), union))


def check_traffic(vectors, k, dtype, wire="fp32"):
    results, world = dsa(vectors, k, wire)
    size, numel = len(vectors), vectors[0].numel
    for rank in range(size):
        exact = topk_dsa_traffic(rank, size, numel, dtype, *counted(vectors, rank), wire=WIRES[wire])
        assert (world.bytes_sent[rank], world.messages_sent[rank]) == exact[:2]
        assert exact.nbytes <= TopKDSA(wire=WIRES[wire]).sent(rank, size, k, numel, dtype).nbytes
    return results, world


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_bytes_are_those_of_the_entries(data):
    size, numel = data.draw(st.sampled_from([1, 2, 3, 5, 8])), data.draw(st.integers(1, 60))
    k, dtype = data.draw(st.integers(1, numel)), data.draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    check_traffic([topk(torch.randn(numel, generator=generator).to(dtype), k) for _ in range(size)], k, dtype)


@pytest.mark.parametrize(("size", "k"), [(2, 40), (3, 300), (6, 40), (8, 2), (14, 40), (33, 9), (64, 2)])
def test_bytes_with_many_ranks(size, k):
    generator = torch.Generator().manual_seed(size)
    vectors = [topk(torch.randn(640, generator=generator), k) for _ in range(size)]
    check_traffic(vectors, k, torch.float32)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("size", "k"), [(2, 40), (3, 300), (5, 3), (14, 40)])
def test_bytes_on_every_wire(size, k, wire):
    generator = torch.Generator().manual_seed(size)
    vectors = [topk(torch.randn(641, generator=generator), k) for _ in range(size)]
    check_traffic(vectors, k, torch.float32, wire)


@pytest.mark.parametrize("size", [2, 4, 8, 14, 16])
def test_bytes_are_the_papers_where_selections_spread_evenly(size):
    """4k(P − 1)/P elements where all select alike, (2k + n)(P − 1)/P where the sums are dense; and sizes, and slots."""
    k, n = 4 * size, 4 * size * size
    headers = 16 * (size - 1 + 2 * (size - 1).bit_length()) + 8 * (size - 1)
    alike = torch.zeros(n)
    alike[::size] = 1
    _, world = dsa([topk(alike, k)] * size, k)
    assert world.bytes_sent == [4 * 4 * k * (size - 1) // size + headers] * size
    _, world = dsa([topk(alike.roll(rank), k) for rank in range(size)], k)
    assert world.bytes_sent == [4 * (2 * k + n) * (size - 1) // size + headers] * size


@pytest.mark.parametrize("size", [3, 5, 8])
def test_floats_have_the_bits_of_an_allgather(size):
    """They are added in the tree over ranks, not in order of arrival, which begins with the owner's own."""
    generator = torch.Generator().manual_seed(size)
    vectors = [topk(torch.randn(64, generator=generator), 32) for _ in range(size)]
    results, world = dsa(vectors, 32)
    others = world.run(lambda c: sparse_allreduce(vectors[c.rank], c, k=32, algorithm="topk-allgather"))
    assert torch.equal(results[0].total.to_dense(), others[0].total.to_dense())


def test_values_that_tie_with_the_kth_are_kept():
    """The published code selects by a strict > the k-th value: of these it sends nothing at all."""
    vectors = [topk(torch.ones(4), 2), topk(torch.ones(4), 2)]
    results, _ = dsa(vectors, 2)
    for result in results:
        assert result.total.to_dense().tolist() == [2, 2, 0, 0]
        assert not len(result.dropped)


def test_dense_blocks_hold_all_their_elements_sparse_ones_their_entries():
    values = torch.tensor([5.0, 6, 7, 8, 0, 0, 9, 0])
    results, _ = dsa([topk(values, 5)] * 2, 5)
    assert results[0].total.indices.tolist() == [0, 1, 2, 3, 6]
    assert results[0].total.to_dense().tolist() == (2 * values).tolist()
