"""SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706) on scikit-learn's handwritten digits, in 4 simulated ranks.

    python examples/sparseloco_digits.py

DiLoCo whose ranks send of each chunk of 4,096 elements the 64 largest, in 2 bits each; what is not sent decays and is
added to the next block's change: a compressor and a sum, given to `DiLoCo` as arguments.

    a = β·e + Δ;  s = the largest of a, in 2 bits;  e ← a − s;  z ← z + η·mean of s                  every τ steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld, allgather, allreduce
from local_sgd import DiLoCo
from sklearn.datasets import load_digits
from sparse_compress import SparseVector, topk
from torch import Tensor, nn

CHUNK = 4096
RANKS, EPOCHS, BATCH, TAU = 4, 30, 16, 15


class SparseLoCo:
    """Chunk-wise top-k in 2 bits with decayed error feedback; its law: sent + e′ = β·e + Δ.

    k: elements of each chunk that are sent.  decay: β.
    """

    def __init__(self, k: int = 64, decay: float = 0.95) -> None:
        self.k, self.decay = k, decay
        self.errors: dict[str, Tensor] = {}

    def compress(self, name: str, delta: Tensor) -> SparseVector:
        """What is sent of Δ and the error of that name."""
        accumulated = delta + self.decay * self.errors.get(name, torch.zeros_like(delta))
        sent = in_two_bits(by_chunks(accumulated, self.k))
        self.errors[name] = accumulated - sent.to_dense()
        return sent

    def restore(self, name: str, dropped: SparseVector) -> None:
        """What a sum did not take."""
        self.errors[name] += dropped.to_dense()

    def state_dict(self) -> dict[str, Tensor]:
        """The errors."""
        return dict(self.errors)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on with them."""
        self.errors = {name: error.clone() for name, error in state.items()}


def by_chunks(x: Tensor, k: int) -> SparseVector:
    """The k largest of each chunk, by magnitude; all of a chunk that has fewer."""
    chosen = [(start, topk(chunk, k)) for start, chunk in zip(range(0, len(x), CHUNK), x.split(CHUNK), strict=True)]
    indices = torch.cat([one.indices + start for start, one in chosen])
    return SparseVector(indices, torch.cat([one.values for _, one in chosen]), len(x))


def in_two_bits(sparse: SparseVector) -> SparseVector:
    """Each value becomes the nearest of ±s and ±s/3, where s is the largest of its chunk."""
    scale = largest(sparse)[sparse.indices.long() // CHUNK]
    third = torch.where(sparse.values.abs() > 2 / 3 * scale, 1.0, 1 / 3) * scale
    return SparseVector(sparse.indices, torch.where(sparse.values < 0, -third, third), sparse.numel)


def largest(sparse: SparseVector) -> Tensor:
    """Magnitude, of each chunk."""
    found = sparse.values.new_zeros(-(-sparse.numel // CHUNK))
    return found.scatter_reduce(0, sparse.indices.long() // CHUNK, sparse.values.abs(), "amax")


def encode(sparse: SparseVector) -> Tensor:
    """Scales as float32, then 12 bits a place in the chunk, then 2 bits a value: uint8."""
    scales = largest(sparse)
    steps = (sparse.values < 0).int() * 2 + (sparse.values.abs() == scales[sparse.indices.long() // CHUNK]).int()
    return torch.cat([scales.view(torch.uint8), to_bytes(sparse.indices % CHUNK, 12), to_bytes(steps, 2)])


def decode(message: Tensor, numel: int, k: int) -> SparseVector:
    """What `encode` was given."""
    lengths = torch.tensor([min(k, numel - start) for start in range(0, numel, CHUNK)])
    chunk = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    scales, places, steps = message.split([4 * len(lengths), -(-len(chunk) * 12 // 8), -(-len(chunk) * 2 // 8)])
    step = from_bytes(steps, len(chunk), 2)
    magnitude = torch.where(step % 2 == 1, 1.0, 1 / 3) * scales.clone().view(torch.float32)[chunk]
    indices = from_bytes(places, len(chunk), 12) + CHUNK * chunk
    return SparseVector(indices.int(), torch.where(step >= 2, -magnitude, magnitude), numel)


def to_bytes(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, one after the other."""
    ones = (numbers[:, None] >> torch.arange(bits)) & 1
    ones = torch.cat([ones.view(-1), ones.new_zeros(-ones.numel() % 8)]).view(-1, 8)
    return (ones << torch.arange(8)).sum(1).to(torch.uint8)


def from_bytes(data: Tensor, count: int, bits: int) -> Tensor:
    """The numbers that `to_bytes` was given, int64."""
    ones = (data[:, None].long() >> torch.arange(8)) & 1
    return (ones.view(-1)[: count * bits].view(count, bits) << torch.arange(bits)).sum(1)


@dataclass
class Sum:
    """Over ranks. Nothing is dropped."""

    total: Tensor
    dropped: None = None


def gathered_sum(sent: SparseVector, comm: Communicator, *, k: int) -> Sum:
    """Every rank sends its message to all others."""
    total = torch.zeros(sent.numel)
    for message in allgather(encode(sent), comm):
        total += decode(message, sent.numel, k).to_dense()
    return Sum(total)


def sparseloco(inner: torch.optim.Optimizer, *, k: int = 64, decay: float = 0.95, **options: Any) -> DiLoCo:
    """DiLoCo with the two; the outer rate is 1, and the decayed error is in the place of an outer momentum."""
    compressor, outer = SparseLoCo(k, decay), partial(torch.optim.SGD, lr=1.0)
    return DiLoCo(inner, outer=outer, compress=compressor, allreduce=partial(gathered_sum, k=k), **options)


class Synchronous:
    """The mean of gradients at every step, beside which the others are seen."""

    def __init__(self, inner: torch.optim.Optimizer, comm: Communicator) -> None:
        self.inner, self.comm = inner, comm
        self.ps = [p for group in inner.param_groups for p in group["params"]]
        for p in self.ps:
            p.data.copy_(allreduce(p.data * (comm.rank == 0), comm))

    def step(self) -> None:
        """Of the wrapped one, with the mean gradient."""
        flat = allreduce(torch.cat([p.grad.view(-1) for p in self.ps]), self.comm, average=True)
        for p, grad in zip(self.ps, flat.split([p.numel() for p in self.ps]), strict=True):
            p.grad.copy_(grad.view_as(p))
        self.inner.step()

    def zero_grad(self) -> None:
        """Of the wrapped one."""
        self.inner.zero_grad()

    def average(self) -> None:
        """Nothing is apart."""

    finish = average


def train(comm: Communicator, wrap: Callable[[Any, Communicator], Any], seed: int) -> tuple[float, int]:
    """Test accuracy, and bytes that this rank sent after the beginning."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    own, test = order[:1437][comm.rank :: comm.size], order[1437:]
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for p in model.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    optimizer = wrap(model.parameters(), comm)
    begun = comm.bytes_sent
    for _ in range(EPOCHS):
        for batch in own[torch.randperm(len(own), generator=generator)].split(BATCH)[: 1437 // RANKS // BATCH]:
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.average()
    optimizer.finish()
    return float((model(images[test]).argmax(1) == labels[test]).float().mean()), comm.bytes_sent - begun


WAYS: dict[str, Callable[[Any, Communicator], Any]] = {
    "synchronous SGD": lambda ps, comm: Synchronous(torch.optim.SGD(ps, lr=0.1, momentum=0.9), comm),
    "synchronous AdamW": lambda ps, comm: Synchronous(torch.optim.AdamW(ps, lr=2e-3), comm),
    "DiLoCo": lambda ps, comm: DiLoCo(torch.optim.AdamW(ps, lr=2e-3), comm=comm, sync_every=TAU),
    "DiLoCo, int4": lambda ps, comm: DiLoCo(torch.optim.AdamW(ps, lr=2e-3), comm=comm, sync_every=TAU, compress="int4"),
    "SparseLoCo": lambda ps, comm: sparseloco(torch.optim.AdamW(ps, lr=2e-3), comm=comm, sync_every=TAU),
}


def main() -> None:
    """The table."""
    steps = EPOCHS * (1437 // RANKS // BATCH)
    print(f"digits, {RANKS} ranks, {steps} steps, τ = {TAU}\n\n| | test accuracy, 3 seeds | kB a rank and exchange |")
    print("|---|---|---|")
    for name, wrap in WAYS.items():
        runs = [SimulatedWorld(RANKS).run(partial(train, wrap=wrap, seed=seed))[0] for seed in range(3)]
        exchanges = steps if name.startswith("sync") else steps // TAU + 1  # the last one by finish()
        accuracies = ", ".join(f"{accuracy:.1%}" for accuracy, _ in runs)
        print(f"| {name} | {accuracies} | {runs[0][1] / exchanges / 1000:.1f} |")


if __name__ == "__main__":
    main()
