"""States and optimizers that are made before the process group, as under mp.spawn, or outlive it, on real ranks.

usage, on every rank: python late_groups.py REPORT.json
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from sparse_collectives import DistributedOptimizer, SparseHookState, sparse_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK, SIZE = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
HOST, PORT = os.environ.pop("MASTER_ADDR"), int(os.environ.pop("MASTER_PORT"))
OPENED = []


def open_group():
    """The default group of all ranks, another one each time."""
    if not OPENED:
        OPENED.append(dist.TCPStore(HOST, PORT, SIZE, is_master=RANK == 0))
    OPENED.append(None)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(len(OPENED)), OPENED[0]), rank=RANK, world_size=SIZE)


def model_of():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def backward(model, step):
    model(torch.full((2, 8), float(RANK + step))).square().mean().backward()


def train_step(model, optimizer):
    backward(model, 1)
    optimizer.step()


def a_state_made_before():
    """Finds the ranks at its first use."""
    for algorithm in ("gtopk", "auto"):
        model = model_of()
        state = SparseHookState(density=0.2, algorithm=algorithm, named_parameters=model.named_parameters())
        open_group()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, sparse_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()
        assert (state.comm.rank, state.comm.size) == (RANK, SIZE)
        for p in model.parameters():
            other = p.detach().clone()
            dist.broadcast(other, 0)
            dist.barrier()
            agree = torch.tensor(torch.equal(other, p.detach()))
            everywhere = [torch.empty_like(agree) for _ in range(SIZE)]
            dist.all_gather(everywhere, agree)
            assert all(everywhere)
        dist.destroy_process_group()


def a_state_used_before():
    state = SparseHookState()
    assert state.comm.size == 1
    open_group()
    ddp = DistributedDataParallel(model_of())
    ddp.register_comm_hook(state, sparse_hook)
    with pytest.raises(RuntimeError, match=f"found no process group as the default, and there is one of {SIZE} ranks"):
        backward(ddp, 0)
    dist.destroy_process_group()


def a_state_of_an_earlier_group():
    open_group()
    state = SparseHookState()
    dist.destroy_process_group()
    open_group()
    ddp = DistributedDataParallel(model_of())
    ddp.register_comm_hook(state, sparse_hook)
    with pytest.raises(RuntimeError, match="found another process group as the default"):
        backward(ddp, 0)
    dist.destroy_process_group()


def an_optimizer_made_before():
    for overlap in (False, True):
        model = model_of()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), overlap=overlap
        )
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        open_group()
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match=f"would train alone, but there are {SIZE} ranks now"):
            train_step(model, optimizer)
        assert torch.equal(model.weight, before)
        dist.destroy_process_group()


def an_optimizer_alone_on_purpose():
    """Of a group with one rank, it stays alone."""
    open_group()
    groups = [dist.new_group([rank]) for rank in range(SIZE)]
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=groups[RANK])
    backward(model, 0)
    optimizer.step()
    dist.destroy_process_group()


CASES = [
    a_state_made_before,
    a_state_used_before,
    a_state_of_an_earlier_group,
    an_optimizer_made_before,
    an_optimizer_alone_on_purpose,
]


def main(report):
    outcomes = {}
    for case in CASES:
        try:
            case()
            outcomes[case.__name__] = None
        except BaseException:
            outcomes[case.__name__] = traceback.format_exc()
            if dist.is_initialized():
                dist.destroy_process_group()
    open_group()
    gathered = [None] * SIZE
    dist.all_gather_object(gathered, outcomes)
    if RANK == 0:
        with open(report, "w") as file:
            json.dump({name: [outcome[name] for outcome in gathered] for name in outcomes}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
