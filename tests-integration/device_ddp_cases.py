"""The DDP hook on a device that DDP knows; for on_ranks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from data_parallel import SparseHookState, sparse_hook
from device_cases import integers
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp_hook(comm, device):
    """Σ of all gradients = Σ of what was applied + residuals, with a scaler and several buckets."""
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=1000)
    module = nn.Linear(40, 30, bias=False).to(device)
    wrapped = DistributedDataParallel(module, bucket_cap_mb=1e-3)
    state = SparseHookState(density=0.1, grad_scaler=scaler, named_parameters=module.named_parameters())
    wrapped.register_comm_hook(state, sparse_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    given, applied = torch.zeros(30, 40), torch.zeros(30, 40)
    for step in range(6):
        optimizer.zero_grad()
        x = integers(comm.rank, 40, seed=step)
        scaler.scale(wrapped(x.to(device)).sum()).backward()
        scaler.unscale_(optimizer)
        given += x.expand(30, 40)
        applied += torch.round(module.weight.grad.cpu() * comm.size)
        scaler.step(optimizer)
        scaler.update()
    kept = state.state_dict()["distributed"]["residuals"]["weight"].cpu().view(30, 40)
    dist.all_reduce(given)
    dist.all_reduce(kept)
    assert torch.equal(given, applied + kept)


LAWS = [ddp_hook]
