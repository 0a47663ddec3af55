"""Trains a small classifier with the ring: mpiexec -n 2 python -m ring_reduce_scatter.train"""

from __future__ import annotations

import torch
from communicators import Communicator, as_communicator
from data_parallel import DistributedOptimizer
from sparse_compress import TopK
from torch import nn

from ring_reduce_scatter import RING

STEPS = 40


def train(comm: Communicator) -> list[float]:
    """This rank's loss before every step; each has samples of its own."""
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(64, 20, generator=generator)
    labels = (inputs[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        comm=comm,
        compressor=TopK(0.05),
        algorithm=RING,
        momentum=0.9,
        wire="bf16-packed",
        verify=10,  # the ranks' parameters are the same bits
    )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    from mpi4py import MPI

    world = as_communicator(MPI.COMM_WORLD)
    found = train(world)
    if world.rank == 0:
        print(f"{RING.name} on {world.size} ranks: loss {found[0]:.3f}, then {found[-1]:.3f}")
