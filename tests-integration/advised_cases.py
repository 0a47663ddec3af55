"""Plans with torch's own ways to train, for on_ranks.py."""

from __future__ import annotations

import warnings

import torch
from communicators import Link
from replicas import refuse_unlike
from thinwire.advice.plan import Plan
from thinwire.advice.recommendation import recommend
from thinwire.advice.situation import Situation
from thinwire.advice.ways import BY_NAME, Work
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def low_rank_hooks_train(comm):
    for rank in (1, 2, 4, 8):
        check_training(comm, BY_NAME[f"torch-powersgd rank={rank}"])


def bf16_hook_trains(comm):
    check_training(comm, BY_NAME["torch-bf16"])


def post_local_sgd_trains(comm):
    check_training(comm, BY_NAME["torch-local-sgd sync_every=4"])


def check_training(comm, way):
    """A plan's optimizer learns, and with the end that its note asks for ranks have one model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 70), torch.nn.ReLU(), torch.nn.Linear(70, 40))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp, plan = DistributedDataParallel(model), planned(way, comm.size, [p.shape for p in model.parameters()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        same, optimizer = plan.apply(ddp, inner, steps=STEPS)
    assert same is ddp
    assert ddp._comm_hooks
    generator, losses = torch.Generator().manual_seed(comm.rank), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(20, 60, generator=generator)
        loss = (ddp(x) - 2 * x[:, :40]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    if way.every > 1:
        average_parameters(iter(ddp.parameters()), None)
    refuse_unlike(dict(model.named_parameters()), comm)


def planned(way, ranks, shapes):
    numel = sum(shape.numel() for shape in shapes)
    given = {"link": Link(1e-3, 8e-6), "link_name": "given", "pairs": None, "handling": {}}
    found = Situation(numel, ranks, "cpu", 0.01, 0.0, shapes=shapes, work={way.name: Work()}, optimizer="sgd", **given)
    step = next(step for step in found.predictions() if step.prediction.variant == way.name)
    return Plan(found, recommend(found)._replace(step=step))


LAWS = [low_rank_hooks_train, post_local_sgd_trains]
