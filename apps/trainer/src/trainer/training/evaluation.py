"""Test metrics over all ranks: every test sample is scored once, by one rank; buffers are averaged for that.

Buffers, such as batch normalisation's running statistics, differ between ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from communicators import Communicator, allreduce
from torch import nn

from trainer.app import Task
from trainer.training.sharding import evaluation_batches

BATCH_SIZE = 256  # test samples at once: enough to be fast, little enough for small memories


@torch.no_grad()
def evaluate(task: Task, comm: Communicator, averaged: AbstractContextManager[None]) -> dict[str, float]:
    """The task's test metrics, the same on every rank. averaged: inside it all ranks have the same model."""
    task.model.eval()
    with averaged:
        shards = evaluation_batches(task.test_size, rank=comm.rank, size=comm.size, batch_size=BATCH_SIZE)
        sums = torch.stack([task.score(indices) for indices in shards]).sum(0)
    task.model.train()
    return task.metrics(allreduce(sums, comm))


@contextmanager
def averaged_buffers(model: nn.Module, comm: Communicator) -> Iterator[None]:
    """Inside the block the model's floating-point buffers are their means over ranks; afterwards, its own again.

    Averaging a copy keeps evaluations, and where they happen, from changing the run. Integer buffers (counters)
    stay as they are.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        yield
        return
    own = [buffer.clone() for buffer in buffers]
    mean = allreduce(torch.cat([buffer.double().flatten() for buffer in buffers]), comm, average=True)
    _fill(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]))
    try:
        yield
    finally:
        _fill(buffers, own)


def _fill(buffers: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value.view_as(buffer))
