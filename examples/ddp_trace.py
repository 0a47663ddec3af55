"""A few DDP steps as a trace for ui.perfetto.dev: selection and exchange are bars beside backward.

torchrun --nproc-per-node 2 examples/ddp_trace.py trace.json
"""

import sys

import torch
import torch.distributed as dist
from communicators import tracing
from data_parallel import SparseHookState, sparse_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, WARM_UP, STEPS = 512, 8, 3, 3


def main(path: str) -> None:
    """The first steps make and agree on what the others use."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    state = SparseHookState(density=0.01)
    ddp.register_comm_hook(state, sparse_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(256, WIDTH)).square().mean().backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    with tracing.recording() as recorded:
        for _ in range(STEPS):
            step()
    if dist.get_rank() == 0:
        tracing.write_trace(recorded, path)
        print(f"{path}: {state.stats()}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
