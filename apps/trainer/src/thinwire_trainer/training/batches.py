"""Batches of a rank: who trains on which samples, who tests which, with which random numbers; reading them ahead."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import numpy as np
import torch
from communicators import Communicator
from torch import Tensor

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.app import Batches, Reads, Task
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError

SHUFFLE, AUGMENT, DROPOUT, SAMPLES = range(4)  # purposes of random numbers


def derived_seed(seed: int, purpose: int, index: int) -> int:
    """A 64-bit seed for one purpose and one rank or epoch; equal on every machine and rank."""
    return int(np.random.SeedSequence([seed, purpose, index]).generate_state(1, np.uint64)[0])


BATCH_SIZE = 256  # test samples at once: enough to be fast, little enough for small memories


@dataclass(frozen=True)
class ByIndex:
    """The `Batches` of a task that has none of its own: indices of so many samples."""

    train_size: int
    test_size: int

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[Tensor]:
        """This rank's batches in this epoch, in order: as many on every rank, of like lengths.

        All ranks together see every sample; where `size` does not divide their number, up to size − 1 of them twice. A
        shard is divided evenly, into batches of at most `batch_size` that differ by at most one sample, so that no tiny
        last batch upsets batch normalisation and the mean over ranks is the mean over samples.
        """
        generator = torch.Generator().manual_seed(derived_seed(seed, SHUFFLE, epoch))
        order = torch.randperm(self.train_size, generator=generator)
        shard = -(-self.train_size // size)
        wrapped = torch.arange(rank, size * shard, size) % self.train_size
        return order[wrapped].tensor_split(-(-shard // batch_size))

    def test_batches(self, *, rank: int, size: int) -> Sequence[Tensor]:
        """This rank's test samples: over all ranks each once. At least one batch, maybe empty."""
        return torch.split(torch.arange(self.test_size)[rank::size], BATCH_SIZE)

    def weight(self, batch: Tensor) -> int:
        """Samples."""
        return len(batch)


def batches_of(task: Task) -> Batches:
    """Its own, or those by index."""
    return task if isinstance(task, Batches) else ByIndex(task.train_size, task.test_size)


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


def steps_dealt(task: Task, options: Options) -> int:
    """Steps in an epoch of ranks that come and go, who deal the samples; RunError for a task with its own batches."""
    if isinstance(task, Batches):
        raise RunError(
            f"--elastic deals samples one by one, and {options.dnn} on {options.dataset} has batches of its own, for a "
            f"fixed number of ranks: leave --elastic out"
        )
    return -(-task.train_size // options.batch_size)


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
    """Weight of a batch in the mean training loss; RunError unless that is a whole number from 1 on."""
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


def train_input(task: Task, shard: Sequence[Any], *, seed: int, readers: int) -> Generator[Any, None, None]:
    """Generate the input of `task.loss` for each batch of the shard, in order; to be closed. seed: of this epoch."""
    if not isinstance(task, Reads):
        return (batch for batch in shard)
    return ahead(lambda batch: task.read_train(batch, seed), shard, readers=readers)


def test_input(task: Task, shards: Sequence[Any], *, readers: int) -> Generator[Any, None, None]:
    """Generate the input of `task.score` for each batch, in order; to be closed."""
    if not isinstance(task, Reads):
        return (batch for batch in shards)
    return ahead(task.read_test, shards, readers=readers)


def ahead(read: Callable[[Any], Any], shard: Sequence[Any], *, readers: int) -> Generator[Any, None, None]:
    """read(batch) for each, in order, begun one more in advance than there are threads; without any when asked for.

    An error in `read` is raised where its batch would have come. Closing waits for what is being read.
    """
    if not readers:
        yield from map(read, shard)
        return
    requests, pending = iter(shard), deque[Future[Any]]()
    pool = ThreadPoolExecutor(readers, thread_name_prefix="reader")
    try:
        pending.extend(pool.submit(read, name) for name in islice(requests, readers + 1))
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(read, name) for name in islice(requests, 1))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
