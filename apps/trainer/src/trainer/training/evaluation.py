"""Test metrics over all ranks: every test sample is scored once, by one rank."""

from contextlib import AbstractContextManager, closing

import torch
from communicators import Communicator, allreduce

from trainer.app import Task
from trainer.training.input import test_input
from trainer.training.sharding import evaluation_batches

BATCH_SIZE = 256  # test samples at once: enough to be fast, little enough for small memories


@torch.no_grad()
def evaluate(
    task: Task, comm: Communicator, averaged: AbstractContextManager[None], *, readers: int = 0
) -> dict[str, float]:
    """The task's test metrics, the same on every rank. averaged: inside it all ranks have the same model."""
    task.model.eval()
    shards = evaluation_batches(task.test_size, rank=comm.rank, size=comm.size, batch_size=BATCH_SIZE)
    with averaged, closing(test_input(task, shards, readers=readers)) as batches:
        sums = torch.stack([task.score(batch) for batch in batches]).sum(0)
    task.model.train()
    return task.metrics(allreduce(sums, comm))
