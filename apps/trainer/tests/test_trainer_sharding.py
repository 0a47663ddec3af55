"""Sharding: all samples are used, and ranks never get out of step."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire_trainer.training.batches import BATCH_SIZE, ByIndex

SIZES = {"samples": st.integers(1, 300), "size": st.integers(1, 17), "batch_size": st.integers(1, 40)}


@given(**SIZES, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_every_sample_is_trained_on_and_every_rank_takes_the_same_steps(
    samples: int, size: int, batch_size: int, **order: int
) -> None:
    shards = [
        ByIndex(samples, 1).train_batches(rank=rank, size=size, batch_size=batch_size, **order) for rank in range(size)
    ]

    steps = math.ceil(math.ceil(samples / size) / batch_size)
    lengths = [[len(batch) for batch in shard] for shard in shards]
    assert lengths == [lengths[0]] * size
    assert len(lengths[0]) == steps
    assert 1 <= min(lengths[0]) <= max(lengths[0]) <= min(batch_size, min(lengths[0]) + 1)
    trained = torch.cat([batch for shard in shards for batch in shard])
    assert set(trained.tolist()) == set(range(samples))
    assert len(trained) - samples < size


@given(st.integers(1, 3 * BATCH_SIZE), st.integers(1, 17))
def test_every_test_sample_is_scored_exactly_once(samples: int, size: int) -> None:
    shards = [ByIndex(1, samples).test_batches(rank=rank, size=size) for rank in range(size)]

    assert all(len(shard) >= 1 and max(map(len, shard)) <= BATCH_SIZE for shard in shards)
    assert sorted(torch.cat([batch for shard in shards for batch in shard]).tolist()) == list(range(samples))


def test_epochs_and_seeds_shuffle_differently() -> None:
    def order(**changed: Any) -> list[int]:
        chosen = {"rank": 0, "size": 1, "batch_size": 50, "seed": 1, "epoch": 1} | changed
        return torch.cat(list(ByIndex(50, 1).train_batches(**chosen))).tolist()

    assert order() == order()
    assert len({tuple(order()), tuple(order(epoch=2)), tuple(order(seed=2))}) == 3
