"""Test metrics over all ranks: every test sample is scored once, by one rank."""

from contextlib import AbstractContextManager, closing

import torch
from communicators import Communicator, allreduce

from thinwire_trainer.app import Task
from thinwire_trainer.training.dealing import batches_of
from thinwire_trainer.training.input import test_input


@torch.no_grad()
def evaluate(
    task: Task, comm: Communicator, averaged: AbstractContextManager[None], *, readers: int = 0
) -> dict[str, float]:
    """The task's test metrics, the same on every rank. averaged: inside it all ranks have the same model."""
    task.model.eval()
    shards = batches_of(task).test_batches(rank=comm.rank, size=comm.size)
    with averaged, closing(test_input(task, shards, readers=readers)) as batches:
        sums = torch.stack([task.score(batch) for batch in batches]).sum(0)
    task.model.train()
    return task.metrics(allreduce(sums, comm))
