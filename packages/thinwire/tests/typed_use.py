"""What a user's type checker makes of the public names; `mypy` checks it with the packages, nothing runs it."""

from functools import partial
from typing import assert_type

import numpy as np
import thinwire
import torch
from communicators import Communicator, Schedule, SimulatedWorld, Work, allreduce, as_communicator, run, start
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, sparse_hook
from local_sgd import DiLoCo, LocalSGD
from partial_collectives import EagerSGD, PartialAllreduce
from sparse_collectives import Reduction, sparse_allreduce, sparse_allreduce_array, sparse_allreduce_async
from sparse_compress import ErrorFeedback, SparseVector, TopK, WarmUp, merge
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def collectives(comm: Communicator, schedule: Schedule[str]) -> None:
    sent = ErrorFeedback(TopK(0.01)).compress("weight", torch.ones(9))
    assert_type(sent, SparseVector)
    assert_type(merge(sent, sent, 3), tuple[SparseVector, SparseVector])
    assert_type(sparse_allreduce(sent, comm, k=1), Reduction)
    assert_type(sparse_allreduce_async(sent, comm, k=1), Work[Reduction])
    assert_type(sparse_allreduce_array(torch.ones(9), comm, k=1).total, torch.Tensor)
    sparse_allreduce_array(np.ones((3, 3), np.float32), comm, k=1).total.reshape(9)
    assert_type(run(schedule, comm), str)
    assert_type(start(schedule, comm), Work[str])
    assert_type(as_communicator(None), Communicator)


def rounds(comm: Communicator) -> torch.Tensor:
    total = torch.zeros(3)
    with PartialAllreduce(torch.zeros(3), comm, quorum="solo") as partial:
        for result in partial.allreduce(torch.ones(3)):
            total += result.total
        for result in partial.finish():
            total += result.total
    with PartialAllreduce([torch.zeros(3)], comm) as of_several:
        for result in of_several.allreduce([torch.ones(3)]):
            total += result.total[0]
    return total


def optimizers(model: nn.Linear, sgd: torch.optim.SGD, comm: Communicator) -> None:
    optimizer = UpdateOptimizer.for_model(sgd, model, steps=9, clip_norm=1.0, density=WarmUp(0.01, steps=3))
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    DistributedOptimizer(sgd, model.named_parameters(), comm=comm, density=0.01, wire="int8-packed").step()
    ddp = DistributedDataParallel(model)
    state = SparseHookState.for_model(ddp, sgd, steps=9, algorithm="spardl", options={"teams": 2})
    ddp.register_comm_hook(state, sparse_hook)
    LocalSGD(sgd, comm=comm, sync_every=lambda step: 1 if step < 3 else 4).average()
    DiLoCo(sgd, outer=partial(torch.optim.SGD, lr=0.7), allreduce=partial(PartialAllreduce, quorum="majority"))
    EagerSGD(sgd, model.named_parameters(), quorum="solo", max_staleness=3).finish()
    plan = thinwire.advise(model, steps_per_second=4, optimizer=sgd, link="100mbit", ranks=8)
    model, stepped = plan.apply(model, sgd, steps=9)
    assert_type(stepped, torch.optim.Optimizer)


assert_type(SimulatedWorld(4).run(rounds), list[torch.Tensor])
assert_type(SimulatedWorld(4).run(lambda comm: allreduce(torch.ones(3), comm)), list[torch.Tensor])
