"""Streams: windows go on one after another, and test tokens are foretold once each."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thinwire_text.streams import Window, train_windows
from thinwire_text.streams import test_windows as windows_to_test
from thinwire_trainer.errors import RunError

pytestmark = pytest.mark.quick


def places(shards: Sequence[Sequence[Window]]) -> list[int]:
    """Of all tokens that are read, in the text, one after another."""
    return [
        origin + part.start + step
        for shard in shards
        for part in shard
        for origin in part.origins
        for step in range(part.length)
    ]


@given(
    tokens=st.integers(2, 3000),
    size=st.integers(1, 9),
    batch_size=st.integers(1, 20),
    window=st.integers(1, 60),
    epoch=st.integers(0, 5),
)
def test_every_rank_has_as_many_windows_in_every_epoch_and_each_goes_on_where_the_last_ended(
    tokens: int, size: int, batch_size: int, window: int, epoch: int
) -> None:
    given = {"size": size, "batch_size": batch_size, "window": window, "seed": 7}
    streams = size * batch_size
    if tokens - 1 < streams * window:
        with pytest.raises(RunError, match=f"streams of a text of {tokens:,} tokens would be of .* take fewer"):
            train_windows(tokens, rank=0, epoch=epoch, **given)
        return
    shards = [train_windows(tokens, rank=rank, epoch=epoch, **given) for rank in range(size)]
    assert {len(shard) for shard in shards} == {len(train_windows(tokens, rank=0, epoch=0, **given))}
    for shard in shards:
        assert shard[0].start == 0
        assert all(one.start + one.length == next_.start for one, next_ in pairwise(shard))
        lengths = [part.length for part in shard]
        assert 1 <= min(lengths) <= max(lengths) <= min(window, min(lengths) + 1)
        assert {part.origins for part in shard} == {shard[0].origins}
    read = places(shards)
    assert len(read) == len(set(read))
    assert 0 <= min(read) <= max(read) < tokens - 1  # each is followed by one to foretell
    assert len(read) >= 7 / 8 * (tokens - streams)  # as whole tokens of each stream: fewer than `streams` are over
    assert len(read) >= tokens - streams * (window + 1)


@given(tokens=st.integers(2, 3000), size=st.integers(1, 20), window=st.integers(1, 60))
def test_every_test_token_but_the_first_is_foretold_once_by_whatever_number_of_ranks(
    tokens: int, size: int, window: int
) -> None:
    shards = [windows_to_test(tokens, rank=rank, size=size, window=window) for rank in range(size)]
    assert min(map(len, shards)) >= 1
    read = places(shards)
    assert sorted(read) == list(range(tokens - 1))
    alone = windows_to_test(tokens, rank=0, size=1, window=window)
    starts = {(origin, part.start) for part in alone for origin in part.origins}
    assert {(origin, part.start) for shard in shards for part in shard for origin in part.origins} == starts


def test_streams_begin_elsewhere_in_every_epoch_and_with_every_seed() -> None:
    given = {"rank": 1, "size": 2, "batch_size": 3, "window": 50}
    origins = {train_windows(5000, seed=seed, epoch=epoch, **given)[0].origins for seed in (0, 1) for epoch in (1, 2)}
    assert len(origins) == 4
