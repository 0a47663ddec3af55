"""Ranks that meet every few steps only: local SGD and its relatives on scikit-learn's handwritten digits.

torchrun --nproc-per-node 2 examples/local_sgd_digits.py               # DiLoCo
torchrun --nproc-per-node 2 examples/local_sgd_digits.py overlap       # its exchanges hide behind the next steps
"""

import sys

import torch
import torch.distributed as dist
from ddp_digits import digits
from local_sgd import DiLoCo, LocalSGD, OverlapLocalSGD
from torch import nn

STEPS, BATCH, TAU = 200, 16, 10


def made(name: str, model: nn.Module) -> LocalSGD | DiLoCo | OverlapLocalSGD:
    """The optimizer."""
    if name == "diloco":
        return DiLoCo(torch.optim.AdamW(model.parameters(), lr=2e-3), sync_every=TAU, model=model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kind = {"local": LocalSGD, "overlap": OverlapLocalSGD}[name]
    return kind(plain, sync_every=TAU, model=model)


def main(name: str) -> None:
    """Trains, and evaluates what the algorithm calls its model."""
    rank, size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = digits()
    images, labels = (tensor[rank::size] for tensor in train_set.tensors)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    draw = torch.Generator().manual_seed(rank)
    with made(name, model) as optimizer:  # leaving it ends the last block, on all ranks
        for _ in range(STEPS):
            batch = torch.randint(len(images), (BATCH,), generator=draw)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.average()
    images, labels = test_set.tensors
    accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    if rank == 0:
        print(f"{name} on {size} ranks: test accuracy {accuracy:.1%}; {optimizer.stats()}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1] if len(sys.argv) > 1 else "diloco")
    dist.destroy_process_group()
