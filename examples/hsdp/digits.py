"""Hybrid sharding on scikit-learn's handwritten digits: whole shards inside a node, sparse gradients between nodes.

    torchrun --nproc-per-node 4 examples/hsdp/digits.py

Four ranks stand for two nodes of two. The script is PyTorch's FSDP2 tutorial; the line that makes it sparse is marked.
"""

import sys

import torch
import torch.distributed as dist
from data_parallel import HsdpState, sparse_hsdp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NODES, BATCH, RATE, MOMENTUM = 2, 16, 0.1, 0.9


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images of 8×8 pixels in [0, 1], their labels, and an order of them."""
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    return images, labels, torch.randperm(len(images), generator=torch.Generator().manual_seed(0))


def train(epochs: int) -> tuple[float, int]:
    """The test accuracy, and the bytes that this rank sent to other nodes."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (NODES, size // NODES), mesh_dim_names=("between", "inside"))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    state: HsdpState = sparse_hsdp(model, mesh["between"], density=0.01, momentum=MOMENTUM)  # the line
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)  # its momentum comes before the selection
    images, labels, order = digits()
    for epoch in range(epochs):
        shuffled = order[:1437][torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled[: 1437 // (BATCH * size) * BATCH * size].view(-1, size, BATCH)[:, rank]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        found = model(images[order[1437:]]).argmax(1)
    return float((found == labels[order[1437:]]).float().mean()), state.comm.bytes_sent


if __name__ == "__main__":
    dist.init_process_group("gloo")
    accuracy, sent = train(epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    if dist.get_rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %, {sent:,} bytes sent between the nodes")
    dist.destroy_process_group()
