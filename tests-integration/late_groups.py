"""States and optimizers that are made before the process group, as under mp.spawn, or outlive it; for on_ranks.py."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from data_parallel import DistributedOptimizer, SparseHookState, sparse_hook
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def model_of():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def backward(model, step, rendezvous):
    model(torch.full((2, 8), float(rendezvous.rank + step))).square().mean().backward()


def train_step(model, optimizer, rendezvous):
    backward(model, 1, rendezvous)
    optimizer.step()


def a_state_made_before(rendezvous):
    """Finds the ranks at its first use."""
    for algorithm in ("gtopk", "auto"):
        model = model_of()
        state = SparseHookState(density=0.2, algorithm=algorithm, named_parameters=model.named_parameters())
        rendezvous.open_group()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, sparse_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            backward(ddp, step, rendezvous)
            optimizer.step()
        assert (state.comm.rank, state.comm.size) == (rendezvous.rank, rendezvous.size)
        for p in model.parameters():
            other = p.detach().clone()
            dist.broadcast(other, 0)
            dist.barrier()
            agree = torch.tensor(torch.equal(other, p.detach()))
            everywhere = [torch.empty_like(agree) for _ in range(rendezvous.size)]
            dist.all_gather(everywhere, agree)
            assert all(everywhere)
        dist.destroy_process_group()


def a_state_looked_at_before(rendezvous):
    """It sees one rank, and finds the others when they are there."""
    state = SparseHookState(density=0.2)
    assert (state.comm.size, state.algorithm) == (1, "gtopk")
    assert not state.state_dict()["distributed"]["residuals"]
    rendezvous.open_group()
    ddp = DistributedDataParallel(model_of())
    ddp.register_comm_hook(state, sparse_hook)
    backward(ddp, 0, rendezvous)
    assert state.comm.size == rendezvous.size
    assert state.state_dict()["distributed"]["world_size"] == rendezvous.size
    dist.destroy_process_group()


def a_state_loaded_before(rendezvous):
    """Of one rank it stays that of one; of several it is not taken for one of another number of ranks."""
    zeros = {"parameter 0": torch.ones(3)}
    own = {"rank": 0, "world_size": 1, "algorithm": "gtopk", "algorithm_state": [], "residuals": zeros}
    state = SparseHookState()
    with pytest.raises(RuntimeError, match="before there is a process group: call it after init_process_group"):
        state.load_state_dict({"distributed": {**own, "world_size": 3}})
    state.load_state_dict({"distributed": own})
    rendezvous.open_group()
    ddp = DistributedDataParallel(model_of())
    ddp.register_comm_hook(state, sparse_hook)
    said = f"found no process group as the default, and there is one of {rendezvous.size} ranks"
    with pytest.raises(RuntimeError, match=said):
        backward(ddp, 0, rendezvous)
    dist.destroy_process_group()


def a_state_that_is_never_asked(rendezvous):
    """As a framework does that ignores hooks: said once, by its own optimizer's step. Without names nobody can tell."""
    for named in (True, False):
        model = model_of()
        state = SparseHookState(named_parameters=model.named_parameters() if named else ())
        rendezvous.open_group()
        ddp, other = DistributedDataParallel(model), model_of()
        unrelated = torch.optim.SGD(other.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(25):
                unrelated.step()
                assert step or not caught
                backward(ddp, step, rendezvous)
                optimizer.step()
                optimizer.zero_grad()
        said = [str(warning.message) for warning in caught if "SparseHookState" in str(warning.message)]
        assert ["the hook is not registered" in one for one in said] == [True] * named
        del state
        dist.destroy_process_group()


def a_state_that_is_asked_later(rendezvous):
    """Registered, but a copy of its module, or another model, is what comes first: nothing is said of that."""
    for names in (True, False):
        rendezvous.open_group()
        model, other = model_of(), model_of()
        ddp = DistributedDataParallel(model)
        state = SparseHookState(density=0.2, named_parameters=model.named_parameters() if names else ())
        ddp.register_comm_hook(state, sparse_hook)
        optimizer, unrelated = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (ddp, other))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            averaged = AveragedModel(ddp)
            for _ in range(25):
                unrelated.step()
            if names:
                get_state_dict(
                    ddp, optimizer
                )  # takes a step at a rate of 0, with gradients of zeros, to fill the state
            for step in range(25):
                backward(ddp, step, rendezvous)
                optimizer.step()
                averaged.update_parameters(ddp)
        dist.destroy_process_group()


def a_state_of_an_earlier_group(rendezvous):
    rendezvous.open_group()
    state = SparseHookState()
    dist.destroy_process_group()
    rendezvous.open_group()
    ddp = DistributedDataParallel(model_of())
    ddp.register_comm_hook(state, sparse_hook)
    with pytest.raises(RuntimeError, match="found another process group as the default"):
        backward(ddp, 0, rendezvous)
    dist.destroy_process_group()


def an_optimizer_made_before(rendezvous):
    for overlap in (False, True):
        model = model_of()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), overlap=overlap
        )
        backward(model, 0, rendezvous)
        optimizer.step()
        optimizer.zero_grad()
        rendezvous.open_group()
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match=f"would train alone, but there are {rendezvous.size} ranks now"):
            train_step(model, optimizer, rendezvous)
        assert torch.equal(model.weight, before)
        dist.destroy_process_group()


def an_optimizer_alone_on_purpose(rendezvous):
    """Of a group with one rank, it stays alone."""
    rendezvous.open_group()
    groups = [dist.new_group([rank]) for rank in range(rendezvous.size)]
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=groups[rendezvous.rank])
    backward(model, 0, rendezvous)
    optimizer.step()
    dist.destroy_process_group()


def a_module_freed_after_its_group(rendezvous):
    """Straight after a backward, in which torch's DDP has summed by itself: gloo may be freeing that sum still."""
    for _ in range(10):
        rendezvous.open_group()
        ddp = DistributedDataParallel(model_of())
        backward(ddp, 0, rendezvous)
        dist.destroy_process_group()
        del ddp


LAWS = [
    a_state_made_before,
    a_state_looked_at_before,
    a_state_loaded_before,
    a_state_that_is_never_asked,
    a_state_that_is_asked_later,
    a_state_of_an_earlier_group,
    an_optimizer_made_before,
    an_optimizer_alone_on_purpose,
    a_module_freed_after_its_group,
]
