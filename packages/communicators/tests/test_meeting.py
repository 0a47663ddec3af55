"""How ranks meet in a Store: whoever was there before, those that meet are the ones that are there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from communicators import CollectiveError
from communicators.worlds.meeting import meet
from hypothesis import given
from hypothesis import strategies as st


def met(store, ranks, size, timeout=20.0):
    """What each of these ranks of so many is told."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        meeting = [threads.submit(meet, store, rank, size, timeout) for rank in ranks]
        return [one.exception() or one.result() for one in meeting]


def died(store, rank, names):
    """A rank that had come, and had maybe read what others wrote, and was not heard of again."""
    store.set(f"here/{rank}", f"word-{rank} {names[-1] if names else ''}")


@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_those_that_are_there_meet_whatever_the_store_holds(data, sizes):
    store, names = dist.HashStore(), []
    for size in sizes:
        for rank in data.draw(st.sets(st.integers(0, 4))):
            died(store, rank, names)
        told = set(met(store, range(size), size))
        assert len(told) == 1
        names += told
    assert len(set(names)) == len(sizes)


@pytest.mark.parametrize("before", [0, 3])
def test_who_is_gone_is_named_by_all(before):
    """Though an earlier rank of that number has met in the same Store."""
    store = dist.HashStore()
    if before:
        met(store, range(before), before)
    for rank, error in zip((0, 2), met(store, [0, 2], 3, timeout=0.5), strict=True):
        assert isinstance(error, CollectiveError)
        assert f"rank {rank} waits for ranks [1]" in str(error)
        assert "as_communicator(group, store=...)" in str(error)
    assert len(set(met(store, range(3), 3))) == 1  # those that gave up are not taken for there, and may come again
