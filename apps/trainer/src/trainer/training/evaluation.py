"""Test metrics over all ranks: every test sample is scored once, by one rank."""

from contextlib import AbstractContextManager

import torch
from communicators import Communicator, allreduce

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
