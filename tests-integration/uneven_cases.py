"""Ranks with unlike numbers of inputs, for on_ranks.py."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from communicators import as_communicator
from data_parallel import DistributedOptimizer, UpdateOptimizer
from ddp_cases import Linear, Run, gradients_of
from torch.distributed.algorithms.join import Join


def steps_here():
    return 2 + 2 * dist.get_rank()


def made(kind=DistributedOptimizer, **options):
    model = Linear()
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=options.pop("after", 0.0))
    return model, inner, kind(inner, model.named_parameters(), **{"density": 0.1, **options})


def train(model, optimizer, steps, by_hand=False):
    """What this rank gave."""
    given = {name: torch.zeros(shape) for name, shape in model.shapes.items()}
    for step in range(steps):
        optimizer.zero_grad()
        gradients = gradients_of(step, dist.get_rank())
        for name, g in gradients.items():
            given[name] += g
        model(gradients).backward()
        if by_hand:
            optimizer.synchronize()
        optimizer.step()
    return given


def agreed(tensors):
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, tensor):
            return False
    return True


def an_optimizer_joins():
    """Nothing is lost, and all ranks end with the same bits, whoever had most inputs."""
    ways = [{}, {"overlap": True}, {"algorithm": "spardl"}, {"algorithm": "dense"}, {"nonfinite": "skip"}]
    for options in [*ways, {"by_hand": True}, {"kind": UpdateOptimizer}]:
        by_hand = options.pop("by_hand", False)
        model, _, optimizer = made(**options)
        with Join([optimizer]):
            given = train(model, optimizer, steps_here(), by_hand)
        assert agreed(model.parameters())
        kept = optimizer.state_dict()["distributed"]["residuals"]
        for name, p in model.named_parameters():
            total = given[name] - kept.get(name, 0) if "kind" not in options else -given[name] - kept[name]
            dist.all_reduce(total)
            applied = -p.detach() if "kind" not in options else p.detach()
            assert torch.allclose(total / dist.get_world_size(), applied, atol=1e-4), (options, name)
        train(model, optimizer, 2)  # goes on
        assert agreed(model.parameters())


def who_has_finished_is_not_told_how_to_make_gradients():
    model, _, optimizer = made(UpdateOptimizer)
    with warnings.catch_warnings(), Join([optimizer]):
        warnings.simplefilter("error")
        for step in range(steps_here()):
            optimizer.zero_grad()
            with optimizer.ahead():
                model(gradients_of(step, dist.get_rank())).backward()
            optimizer.step()
    assert agreed(model.parameters())


def the_last_ones_schedule_counts():
    model, inner, optimizer = made(after=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    with Join([optimizer]):
        for _ in range(steps_here()):
            train(model, optimizer, 1)
            schedule.step()
    assert agreed(model.parameters())
    assert agreed(inner.state[p]["momentum_buffer"] for p in model.parameters())


def a_rank_may_have_no_input_and_others_other_experts():
    experts = torch.nn.ModuleList(torch.nn.Linear(4, 1, bias=False) for _ in range(dist.get_world_size()))
    inner, rank = torch.optim.Adam(experts.parameters()), dist.get_rank()
    optimizer = UpdateOptimizer(inner, experts.named_parameters(), algorithm="gtopk", density=1.0)
    with Join([optimizer]):
        for _ in range(2 * rank):
            optimizer.zero_grad()
            with optimizer.ahead():
                experts[rank](torch.ones(4)).sum().backward()
            optimizer.step()
    last = dist.get_world_size() - 1
    assert list(inner.state_dict()["state"]) == [last]
    assert agreed([*experts.parameters(), *inner.state[experts[last].weight].values()])


def what_join_cannot_do_is_refused():
    _, _, optimizer = made(comm=as_communicator(dist.new_group()))
    with pytest.raises(TypeError, match="give the optimizer the process group itself"):
        Join([optimizer])
    _, _, optimizer = made()
    with pytest.raises(TypeError, match=r"divide_by_initial_world_size.*leave it out"):
        Join([optimizer], divide_by_initial_world_size=False)


def ddps_own_join():
    """With the hook: who has joined adds nothing, and keeps its residuals; all end with the last one's model."""
    for options in ({}, {"algorithm": "spardl"}, {"algorithm": "powersgd"}, {"algorithm": "dense-int8"}):
        run = Run(**options)
        run.integers = "algorithm" not in options or options["algorithm"] == "spardl"
        with run.ddp.join():
            for step in range(steps_here()):
                run.step(step)
        assert agreed(run.module.parameters())
        for name, applied in run.applied.items():
            dist.broadcast(applied, dist.get_world_size() - 1)  # who joined last has applied all
            run.applied[name] = applied
        run.check_conservation()


LAWS = [
    an_optimizer_joins,
    who_has_finished_is_not_told_how_to_make_gradients,
    the_last_ones_schedule_counts,
    a_rank_may_have_no_input_and_others_other_experts,
    what_join_cannot_do_is_refused,
    ddps_own_join,
]
