"""gTop-k: what the published code loses, bytes, size, and what it becomes where it cuts nothing."""

import pytest
import torch
from communicators import SimulatedWorld
from sparse_collectives import ALGORITHMS, sparse_allreduce
from sparse_compress import SparseVector, topk

pytestmark = pytest.mark.quick


def vector(entries, numel):
    indices, values = zip(*sorted(entries.items()), strict=True)
    return SparseVector(torch.tensor(indices, dtype=torch.int32), torch.tensor(values, dtype=torch.float32), numel)


def gtopk(vectors, k):
    return SimulatedWorld(len(vectors)).run(lambda c: sparse_allreduce(vectors[c.rank], c, k=k))


def test_an_entry_cut_on_the_way_comes_back_although_its_index_survives():
    results = gtopk([vector({0: 5}, 3), vector({1: 6}, 3), vector({0: 7}, 3), vector({2: 1}, 3)], k=1)
    assert all(result.total.to_dense().tolist() == [7, 0, 0] for result in results)
    dropped = sum(result.dropped.to_dense() for result in results)
    assert dropped.tolist() == [5, 6, 1]  # the published code loses the 5


def test_fewer_non_zeros_than_k_are_all_kept():
    results = gtopk([vector({3: 2, 7: 3}, 10), vector({3: 3, 7: 4}, 10)], k=3)
    for result in results:
        assert result.total.to_dense()[[3, 7]].tolist() == [5, 7]  # published: [0, 7]
        assert len(result.total) == 3
        assert not result.dropped.to_dense().any()


def test_indices_beyond_the_integers_of_float32():
    numel, index = 2**25, 2**24 + 1
    results = gtopk([vector({index: 1}, numel), vector({index + 2: 2}, numel)], k=2)
    assert results[0].total.indices.tolist() == [index, index + 2]
    assert results[0].total.values.tolist() == [1, 2]


def test_what_is_cut_is_shared_among_those_who_cut_it():
    """At P = 2 both ranks cut the same k entries; no rank keeps them all."""
    low, high = vector({i: 10 + i for i in range(6)}, 12), vector({6 + i: 30 + i for i in range(6)}, 12)
    results = gtopk([low, high], k=6)
    assert [len(result.dropped) for result in results] == [3, 3]


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("dtype", "entry"), [(torch.float32, 8), (torch.float64, 12)])
def test_bytes_are_k_log_p_entries_and_a_header_each(size, dtype, entry):
    k, header, log = 10, 32, size.bit_length() - 1
    world = SimulatedWorld(size)
    world.run(lambda c: sparse_allreduce(topk(torch.ones(100, dtype=dtype), k), c, k=k))
    assert world.bytes_sent == [entry * k * log + header * log] * size
    assert world.messages_sent == [log] * size


def test_bytes_where_ranks_are_folded():
    """P = 6: ranks 4 and 5 fold into 0 and 1, which send log 4 messages and the result."""
    world = SimulatedWorld(6)
    world.run(lambda c: sparse_allreduce(topk(torch.ones(100), 10), c, k=10))
    assert world.messages_sent == [3, 3, 2, 2, 1, 1]
    assert world.bytes_sent == [messages * 112 for messages in world.messages_sent]


@pytest.mark.slow
def test_a_thousand_ranks():
    size, n, k = 1024, 512, 4
    values = torch.randint(-99, 100, (size, n), generator=torch.Generator().manual_seed(0)).float()
    vectors = [topk(x, k) for x in values]
    world = SimulatedWorld(size)
    results = world.run(lambda c: sparse_allreduce(vectors[c.rank], c, k=k))
    assert all(torch.equal(r.total.pack()[16:], results[0].total.pack()[16:]) for r in results)
    given = sum(sparse.to_dense() for sparse in vectors)
    assert torch.equal(given, results[0].total.to_dense() + sum(r.dropped.to_dense() for r in results))
    assert world.bytes_sent == [10 * (8 * k + 32)] * size


@pytest.mark.parametrize("name", ["gtopk", "topk-allgather"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_with_all_entries_it_is_the_dense_sum(name, size):
    values = torch.randint(-9, 10, (size, 41), generator=torch.Generator().manual_seed(size)).float()

    def reduce(algorithm):
        world = SimulatedWorld(size)
        return world.run(lambda c: sparse_allreduce(topk(values[c.rank], 41), c, k=41, algorithm=algorithm))[0]

    sparse, dense = reduce(name), reduce("dense")
    assert torch.equal(sparse.total.to_dense(), dense.total.to_dense())
    assert torch.equal(dense.total.to_dense(), values.sum(0))
    assert not len(sparse.dropped)
    assert len(dense.total) == 41


def test_the_expression_for_ranks_that_fold():
    sent = ALGORITHMS["gtopk"].sent
    assert sent(0, 3, 5, 100, torch.float32) == (2 * 72, 2, 3)
    assert sent(1, 3, 5, 100, torch.float32) == (72, 1, 1)
    assert sent(2, 3, 5, 100, torch.float32) == (72, 1, 2)
    assert sent(0, 1, 5, 100, torch.float32) == (0, 0, 0)
