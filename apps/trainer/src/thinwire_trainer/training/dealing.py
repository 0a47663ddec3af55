"""Which batches a rank takes: the task's own (`app.Batches`), or its samples by index, dealt out evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from communicators import Communicator
from torch import Tensor

from thinwire_trainer.all_or_none import all_or_none, gather_texts
from thinwire_trainer.app import Batches, Task
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.training.sharding import batches, evaluation_batches

BATCH_SIZE = 256  # test samples at once: enough to be fast, little enough for small memories


@dataclass(frozen=True)
class ByIndex:
    """The `Batches` of a task that has none of its own."""

    task: Task

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[Tensor]:
        """See `Batches.train_batches`."""
        return batches(self.task.train_size, rank=rank, size=size, batch_size=batch_size, seed=seed, epoch=epoch)

    def test_batches(self, *, rank: int, size: int) -> Sequence[Tensor]:
        """See `Batches.test_batches`."""
        return evaluation_batches(self.task.test_size, rank=rank, size=size, batch_size=BATCH_SIZE)

    def weight(self, batch: Tensor) -> int:
        """Samples."""
        return len(batch)


def batches_of(task: Task) -> Batches:
    """Its own, or those by index."""
    return task if isinstance(task, Batches) else ByIndex(task)


def steps_of(batches: Batches, options: Options, size: int) -> int:
    """Steps in an epoch of so many ranks."""
    return len(_shard(batches, options, rank=0, size=size, epoch=0))


def agreed_steps(batches: Batches, options: Options, comm: Communicator) -> int:
    """Steps in an epoch, on every rank; AgreedError unless they are as many on all, and each has something to test."""
    with all_or_none(comm):
        steps = len(_shard(batches, options, rank=comm.rank, size=comm.size, epoch=0))
        if not steps or not _dealt(batches.test_batches(rank=comm.rank, size=comm.size), "test_batches"):
            raise RunError("a rank has no batch to train on, or none to test: take fewer ranks or more data")
    counts = gather_texts(str(steps), comm)
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise AgreedError(
                f"rank 0 has {counts[0]} batches in an epoch, rank {rank} has {count}: every rank needs the same data"
            )
    return steps


def shard_of(batches: Batches, options: Options, comm: Communicator, *, epoch: int, steps: int) -> Sequence[Any]:
    """This rank's batches of an epoch; AgreedError unless they are as many as steps on every rank."""
    with all_or_none(comm):
        shard = _shard(batches, options, rank=comm.rank, size=comm.size, epoch=epoch)
        if len(shard) != steps:
            raise RunError(
                f"there are {len(shard)} batches in epoch {epoch + 1}, expected {steps} as in the first: "
                f"train_batches is to give as many in every epoch"
            )
        for batch in shard:
            weight_of(batches, batch)
    return shard


def weight_of(batches: Batches, batch: Any) -> int:
    """What it counts in the mean training loss; RunError unless that is a whole number from 1 on."""
    weight = batches.weight(batch)
    try:
        whole = index(weight)
    except (TypeError, ValueError):
        whole = 0
    if whole < 1:
        raise RunError(
            f"weight() of a batch is {weight!r:.60}, expected a whole number from 1 on, such as of its samples"
        )
    return whole


def _shard(batches: Batches, options: Options, *, rank: int, size: int, epoch: int) -> Sequence[Any]:
    given = batches.train_batches(rank=rank, size=size, batch_size=options.batch_size, seed=options.seed, epoch=epoch)
    return _dealt(given, "train_batches")


def _dealt(given: Sequence[Any], name: str) -> Sequence[Any]:
    """RunError unless it can be counted, and begun in the middle."""
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise RunError(f"{name}() gives a {type(given).__name__}, expected a sequence, such as a list")
    return given
