"""Reading ahead: the same batches in the same order, errors where they belong, and no more than was asked for."""

import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire_trainer.app import Reads
from thinwire_trainer.training.batches import ahead, train_input
from torch import Tensor


@given(batches=st.integers(0, 9), readers=st.integers(0, 4))
def test_in_order(batches: int, readers: int) -> None:
    shard = [torch.tensor([number]) for number in range(batches)]
    with closing(ahead(lambda indices: 10 * int(indices), shard, readers=readers)) as read:
        assert list(read) == [10 * number for number in range(batches)]


@pytest.mark.parametrize("readers", [0, 1, 3])
def test_no_more_is_begun_than_can_be_used_soon(readers: int) -> None:
    begun: list[int] = []
    shard = [torch.tensor([number]) for number in range(20)]
    with closing(ahead(lambda indices: begun.append(int(indices)), shard, readers=readers)) as read:
        for _ in range(5):
            next(read)
    # Of 5 taken; each taking asks for one more, the first for as many as there are threads and one.
    assert sorted(begun) == list(range(len(begun)))
    assert len(begun) <= (5 if not readers else 5 + readers + 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.parametrize("readers", [0, 1, 3])
def test_an_error_comes_where_its_batch_would_have(readers: int) -> None:
    def read(indices: Tensor) -> int:
        if int(indices) == 2:
            raise ValueError("damaged")
        return int(indices)

    got = []
    with (
        pytest.raises(ValueError, match="damaged"),
        closing(ahead(read, [torch.tensor([number]) for number in range(5)], readers=readers)) as batches,
    ):
        got.extend(batches)
    assert got == [0, 1]


def test_several_threads_read_at_once() -> None:
    """Each waits for the other; one alone would wait until the time-out, which is an error."""
    meeting = threading.Barrier(2, timeout=60)
    with closing(ahead(lambda indices: meeting.wait(), [torch.tensor([0])] * 2, readers=2)) as read:
        assert sorted(read) == [0, 1]


class Remembers:
    """A task that reads."""

    def read_train(self, indices: Tensor, seed: int) -> Any:
        return indices + seed

    def read_test(self, indices: Tensor) -> Any:
        return -indices


def test_a_task_that_does_not_read_gets_indices() -> None:
    shard = [torch.tensor([1, 2]), torch.tensor([3])]
    with closing(train_input(object(), shard, seed=5, readers=2)) as read:  # type: ignore[arg-type]
        assert [batch.tolist() for batch in read] == [[1, 2], [3]]
    assert isinstance(Remembers(), Reads)
    with closing(train_input(Remembers(), shard, seed=5, readers=2)) as read:  # type: ignore[arg-type]
        assert [batch.tolist() for batch in read] == [[6, 7], [8]]
