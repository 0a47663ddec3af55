"""A few DDP steps of all ranks as a trace for ui.perfetto.dev: computing, selecting, messages, waiting.

torchrun --nproc-per-node 3 examples/ddp_trace.py trace.json
"""

import sys

import torch
import torch.distributed as dist
from communicators import barrier, tracing
from data_parallel import SparseHookState, sparse_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, WARM_UP, STEPS = 512, 8, 3, 3


def main(path: str) -> None:
    """The first steps make and agree on what the others use."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    state = SparseHookState(density=0.01)
    ddp.register_comm_hook(state, sparse_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with tracing.labelled("forward"):
            loss = ddp(torch.randn(256, WIDTH)).square().mean()
        with tracing.labelled("backward"):
            loss.backward()
        with tracing.labelled("step"):
            optimizer.step()

    for _ in range(WARM_UP):
        step()
    barrier(dist.group.WORLD)  # recordings begin together, so that no message is seen on one side alone
    with tracing.recording() as recorded:
        for _ in range(STEPS):
            step()
    tracing.write_trace(recorded, path, dist.group.WORLD)
    if dist.get_rank() == 0:
        print(f"{path}: {state.stats()}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
