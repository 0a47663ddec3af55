"""Compressors of one's own beside those that are there: what is sent of a gradient, and what that does to learning.

    python examples/own_compressor.py

A compressor is any callable from a tensor to a SparseVector of at most `entries(numel)` entries. Two simulated ranks
train on scikit-learn's handwritten digits with each of them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld
from data_parallel import DistributedOptimizer
from ddp_digits import digits
from sparse_compress import (
    ByParts,
    Compressor,
    DGCTopK,
    GaussianK,
    RandomK,
    SparseVector,
    StatefulCompressor,
    Threshold,
    ThresholdReuse,
    TopK,
    clip_locally,
)
from torch import Tensor, nn

RANKS, STEPS, BATCH, DENSITY = 2, 80, 16, 0.02


class Blocks:
    """The blocks of 8 neighbours with the largest norms: fewer places to look for, whole lines of memory."""

    def entries(self, numel: int) -> int:
        """The most that is sent, alike on every rank."""
        return min(numel, 8 * max(1, round(DENSITY * numel / 8)))

    def __call__(self, tensor: Tensor) -> SparseVector:
        flat = tensor.detach().reshape(-1).float()
        count = self.entries(len(flat)) // 8
        norms = nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8).norm(dim=1)
        blocks = norms.topk(max(1, min(count, len(norms)))).indices.sort().values
        indices = (8 * blocks[:, None] + torch.arange(8)).view(-1)
        indices = indices[indices < len(flat)]
        return SparseVector(indices.to(torch.int32), flat[indices], len(flat))


class InTurn:
    """Every 50th element, from another one on in every call of a name: checkpoints hold where each is."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    def entries(self, numel: int) -> int:
        """The most that is sent, alike on every rank."""
        return -(-numel // 50)

    def __call__(self, tensor: Tensor, *, name: str = "") -> SparseVector:
        flat, call = tensor.detach().reshape(-1).float(), self._calls.get(name, 0)
        self._calls[name] = call + 1
        indices = torch.arange(call % min(50, len(flat)), len(flat), 50)
        return SparseVector(indices.to(torch.int32), flat[indices], len(flat))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return dict(self._calls)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on there."""
        self._calls = dict(state)


def compressors(numels: list[int]) -> Iterator[Compressor]:
    """One of each."""
    yield from (TopK(DENSITY), DGCTopK(DENSITY), GaussianK(DENSITY), Threshold(0.02, DENSITY))
    yield from (ThresholdReuse(DENSITY, every=8), RandomK(DENSITY, seed=1), ByParts(TopK(DENSITY), numels))
    yield from (Blocks(), InTurn())


def train(comm: Communicator, number: int) -> tuple[str, float, float]:
    """Its name, the test accuracy, and how many times fewer bytes than dense."""
    train_set, test_set = digits()
    images, labels = (tensor[comm.rank :: comm.size] for tensor in train_set.tensors)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    compressor = list(compressors([p.numel() for p in model.parameters()]))[number]
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        comm=comm,
        compressor=compressor,
        algorithm="topk-allgather",
    )
    draw = torch.Generator().manual_seed(comm.rank)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        clip_locally([p.grad for p in model.parameters()], max_norm=5.0, ranks=comm.size)  # DGC's; clip_norm= does it
        optimizer.step()
    images, labels = test_set.tensors
    stats = optimizer.stats()
    accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    return _said(compressor), accuracy, stats["bytes_dense"] / stats["bytes_sent"]


def _said(compressor: Compressor) -> str:
    kinds = {"keeps state": isinstance(compressor, StatefulCompressor), "fused": hasattr(compressor, "step")}
    said = [kind for kind, holds in kinds.items() if holds]
    return f"{type(compressor).__name__}{f' ({said[0]})' if said else ''}"


def main() -> None:
    """The table."""
    for number in range(len(list(compressors([1])))):
        name, accuracy, fewer = SimulatedWorld(RANKS).run(partial(train, number=number))[0]
        print(f"{name:>32}: {accuracy:.1%} with {fewer:.0f}x fewer bytes")


if __name__ == "__main__":
    main()
