"""A compressor of one's own that sends something of every element: one bit each, and one scale.

    python examples/own_dense_compressor.py

    a ← e + gradient;  send s = mean|a| · sign(a);  e ← a − s            (EF-SignSGD, Karimireddy et al., ICML 2019)

A `DenseCompressor` says how what has accumulated is summed over the ranks, and what is left for the next step.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from communicators import Communicator, Schedule, SimulatedWorld, schedules
from data_parallel import DenseCompressor, DistributedOptimizer
from ddp_digits import digits
from sparse_collectives import DenseReduction
from torch import Tensor, nn

RANKS, STEPS, BATCH = 2, 150, 16


@dataclass(frozen=True)
class Signs(DenseCompressor):
    """Signs of all elements, and their mean magnitude."""

    name = "signs"

    def schedule(
        self, accumulated: Tensor, rank: int, size: int, state: object = None
    ) -> Schedule[DenseReduction[Tensor]]:
        """Every rank's message to all; its sum, in the order of ranks, has the same bits everywhere."""
        message, numel = packed(accumulated), len(accumulated)
        blocks = yield from schedules.allgather_blocks(message, [len(message)] * size, rank, size)
        total = torch.stack([unpacked(block, numel) for block in blocks]).sum(0)
        return DenseReduction(total, accumulated - unpacked(message, numel))


def packed(given: Tensor) -> Tensor:
    """uint8: the scale, then a bit an element."""
    bits = torch.from_numpy(np.packbits((given >= 0).numpy()))
    return torch.cat([given.abs().mean().view(1).view(torch.uint8), bits])


def unpacked(message: Tensor, numel: int) -> Tensor:
    """What a rank has sent."""
    signs = torch.from_numpy(np.unpackbits(message[4:].numpy(), count=numel)).float() * 2 - 1
    return message[:4].clone().view(torch.float32) * signs


def train(comm: Communicator, algorithm: str | DenseCompressor) -> str:
    """What came of it."""
    train_set, test_set = digits()
    images, labels = (tensor[comm.rank :: comm.size] for tensor in train_set.tensors)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, algorithm=algorithm)
    draw = torch.Generator().manual_seed(comm.rank)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    images, labels = test_set.tensors
    return f"test accuracy {float((model(images).argmax(dim=1) == labels).float().mean()):.1%}; {optimizer.stats()}"


if __name__ == "__main__":
    ways: dict[str, str | DenseCompressor] = {"dense": "dense", "signs": Signs()}
    for name, way in ways.items():
        print(f"{name}: {SimulatedWorld(RANKS).run(partial(train, algorithm=way))[0]}")
