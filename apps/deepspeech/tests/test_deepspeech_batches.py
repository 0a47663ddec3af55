"""Who trains on which utterances: the law of the trainer's own sharding, and alike work."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire_deepspeech.data.utterances import bucketed, shuffled, sorted_batches

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60).map(np.array)


@pytest.mark.parametrize("deal", [bucketed, shuffled])
@given(LENGTHS, st.integers(1, 5), st.integers(1, 7), st.integers(0, 9))
def test_every_utterance_is_dealt_out_in_batches_of_the_same_sizes(deal, lengths, size, batch_size, seed):
    shards = [
        deal(lengths, rank=rank, size=size, batch_size=batch_size, random=np.random.default_rng(seed))
        for rank in range(size)
    ]
    assert len({tuple(len(batch) for batch in shard) for shard in shards}) == 1
    assert all(1 <= len(batch) <= batch_size for batch in shards[0])
    taken = torch.cat([batch for shard in shards for batch in shard])
    assert set(taken.tolist()) == set(range(len(lengths)))
    assert len(taken) < len(lengths) + size


@given(LENGTHS, st.integers(1, 5), st.integers(1, 7))
def test_every_test_utterance_is_scored_once(lengths, size, batch_size):
    shards = [sorted_batches(lengths, rank=rank, size=size, batch_size=batch_size) for rank in range(size)]
    assert sorted(torch.cat([batch for shard in shards for batch in shard]).tolist()) == list(range(len(lengths)))
    assert all(shards)


def test_buckets_have_like_lengths_on_all_ranks():
    lengths = np.random.default_rng(0).integers(20, 400, 400)

    def spread(deal):
        shards = [deal(lengths, rank=r, size=4, batch_size=8, random=np.random.default_rng(1)) for r in range(4)]
        steps = [np.array([lengths[batch].max() for batch in step]) for step in zip(*shards, strict=True)]
        padding = np.mean([lengths[batch].max() / lengths[batch].mean() for shard in shards for batch in shard])
        return np.mean([step.max() / step.mean() for step in steps]), padding

    (work, padding), (work_unlike, padding_unlike) = spread(bucketed), spread(shuffled)
    assert work < 1.05 < work_unlike
    assert padding < 1.2 < padding_unlike


def test_batches_differ_from_epoch_to_epoch_in_order_and_in_what_is_together():
    lengths = np.random.default_rng(0).integers(20, 400, 64)

    def batches(epoch):
        found = bucketed(lengths, rank=0, size=1, batch_size=8, random=np.random.default_rng([0, epoch]))
        return [batch.tolist() for batch in found]

    assert batches(0) == batches(0)
    assert {frozenset(batch) for batch in batches(0)} != {frozenset(batch) for batch in batches(1)}
    assert [lengths[batch[0]] for batch in batches(0)] != sorted(lengths[batch[0]] for batch in batches(0))
