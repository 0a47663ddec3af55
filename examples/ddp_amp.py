"""DDP in mixed precision: GradScaler, accumulation and clipping, and what the network was spared.

    torchrun --nproc-per-node 2 examples/ddp_amp.py

The state is given the scaler: it keeps what waits unscaled, and a step that the scaler skips leaves no trace in it.
Gradients are clipped before the selection (clip_norm): afterwards few entries hold what many steps have saved up.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from communicators import Stats
from data_parallel import SparseHookState, sparse_hook
from ddp_digits import digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BACKWARDS, BATCH = 100, 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.bfloat16


def main() -> Stats:
    """What training has cost."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = (tensor[rank::size].to(DEVICE) for tensor in digits()[0].tensors)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(DEVICE)
    scaler = torch.amp.GradScaler(DEVICE)
    state = SparseHookState(
        density=0.01, momentum=0.9, clip_norm=5.0, grad_scaler=scaler, named_parameters=model.named_parameters()
    )
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, sparse_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for backward in range(BACKWARDS):
            batch = torch.randint(len(images), (BATCH,), generator=draw).to(DEVICE)
            with nullcontext() if backward == BACKWARDS - 1 else ddp.no_sync():
                with torch.autocast(DEVICE, DTYPE):
                    loss = nn.functional.cross_entropy(ddp(images[batch]), labels[batch]) / BACKWARDS
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if rank == 0:
        print(f"loss {loss.item() * BACKWARDS:.3f}, scale {scaler.get_scale():g}; {state}")
    return state.stats()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stats = main()
    if dist.get_rank() == 0:
        print(stats)
    dist.destroy_process_group()
