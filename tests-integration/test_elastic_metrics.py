"""A rank joins a training that takes a metric, and gathers a state, of all ranks after every step."""

import pytest
import torch
from communicators import Elastic, SimulatedWorld, allreduce
from data_parallel import DistributedOptimizer, UpdateOptimizer
from local_sgd import CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, StreamingDiLoCo
from partial_collectives import EagerSGD
from torch import nn
from torch.optim import SGD, AdamW

LATE = 0.2
"""Seconds after which the third rank comes."""


def gradients(model, world):
    return DistributedOptimizer(SGD(model.parameters(), 0.1), model.named_parameters(), comm=world, algorithm="gtopk")


def updates(model, world):
    adam = AdamW(model.parameters(), 0.1)
    return UpdateOptimizer(adam, model.named_parameters(), comm=world, algorithm="gtopk", density=1.0)


def periodic(of, **settings):
    return lambda model, world: of(SGD(model.parameters(), 0.1), sync_every=4, model=model, comm=world, **settings)


FAMILIES = {
    "gradients": gradients,
    "updates": updates,
    "local SGD": periodic(LocalSGD),
    "DiLoCo": periodic(DiLoCo),
    "CoCoD": periodic(CoCoDSGD),
    "overlapping": periodic(OverlapLocalSGD),
    "fragments, late": periodic(StreamingDiLoCo, fragments=2, delay=2),
    "fragments, at once": periodic(StreamingDiLoCo, fragments=2, delay=0),
    "eager": lambda model, world: EagerSGD(SGD(model.parameters(), 0.1), model.named_parameters(), comm=world),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_joins_where_all_take_a_metric_after_every_step(family):
    """Neither waits for the other: who has joined begins with a step, as the others do then."""
    saved = []

    def body(comm):
        comm.elapse(LATE * (comm.rank == 2))
        torch.manual_seed(0)
        model, world = nn.Linear(4, 1), Elastic(comm, at_least=2, timeout=30.0)
        optimizer, sizes, waits = FAMILIES[family](model, world), list[int](), list[float]()
        for samples in world.deal(torch.ones(600, 4), batch_size=6):
            comm.elapse(0.01)
            optimizer.zero_grad()
            (model(samples) - 1).square().mean().backward()
            optimizer.step()
            if family == "eager":
                optimizer.synchronize()
            elif hasattr(optimizer, "average"):
                optimizer.average()
            began = comm.clock()
            sizes.append(int(world.atomic(lambda: allreduce(torch.ones(1), world))))
            if state := optimizer.gathered_state_dict():
                saved.append(state)
            waits.append(comm.clock() - began)
        for end in ("finish", "close"):
            getattr(optimizer, end, int)()
        return sizes, max(waits), torch.cat([p.detach().flatten() for p in model.parameters()])

    ranks = SimulatedWorld(3).run(body)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0] == sorted(ranks[0][0])  # two, then three
    assert 4 < ranks[0][0].count(2) < 90
    assert ranks[2][0] == [3] * ranks[0][0].count(3)
    assert max(wait for _, wait, _ in ranks) < 0.1
    assert len(saved) == len(ranks[0][0])
    assert all(torch.equal(model, ranks[0][2]) for _, _, model in ranks)
