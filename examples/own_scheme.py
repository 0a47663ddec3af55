"""A scheme of one's own that sends something of every element: one bit each, and one scale.

    python examples/own_scheme.py

    a ← e + gradient;  send s = mean|a| · sign(a);  e ← a − s            (EF-SignSGD, Karimireddy et al., ICML 2019)

A `Scheme` says what is kept of a bucket of parameters between steps, a `Transfer` carries one gradient to its mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from communicators import Bucket, Communicator, Schedule, SimulatedWorld, schedules
from data_parallel import DistributedOptimizer, Residuals, Scheme, Transfer, WholeScheme
from ddp_digits import digits
from torch import Tensor, nn

RANKS, STEPS, BATCH = 2, 150, 16


class Signs:
    """See `Scheme`."""

    memories = ("residuals",)

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.residuals = comm, Residuals()

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """A new bucket."""
        self.residuals.register(key, kept)

    def forget(self, key: str) -> dict[str, Tensor]:
        """What was kept of it."""
        return self.residuals.forget(key)

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """From what has accumulated."""
        return SignsUnderWay(self, key, self.residuals.accumulated(key, flat / scale, unused), scale, unused)

    def commit(self) -> None:
        """The step stands."""
        self.residuals.commit()

    def rollback(self) -> None:
        """The step was skipped."""
        self.residuals.rollback()

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """For checkpoints, by parameter."""
        return self.residuals.kept()

    def state_dict(self) -> dict[str, Any]:
        """Nothing else."""
        return {"algorithm_state": []}

    def reset(self, state: Mapping[str, Any]) -> None:
        """Goes on with a checkpoint."""
        self.residuals.reset(state)


@dataclass
class SignsUnderWay:
    """See `Transfer`."""

    scheme: Signs
    key: str
    given: Tensor
    scale: float
    unused: Sequence[slice]
    summed = None  # the transport's own sum cannot do it

    @property
    def facts(self) -> str:
        """What ranks must share."""
        return f"signs(numel={len(self.given)})"

    @property
    def schedule(self) -> Schedule[Tensor]:
        """Every rank's message to all; its sum, in the order of ranks, has the same bits everywhere."""
        message, size = packed(self.given), self.scheme.comm.size
        blocks = yield from schedules.allgather_blocks(message, [len(message)] * size, self.scheme.comm.rank, size)
        return torch.stack([unpacked(block, len(self.given)) for block in blocks]).sum(0)

    def agreed(self, result: Tensor) -> Tensor:
        """A NaN of any rank is in its scale, and so in all of the sum."""
        return result

    def own(self, result: Tensor) -> Tensor:
        """Nothing of the sum is this rank's alone."""
        return result[:0]

    def suspect(self) -> int:
        """Where this rank gave a NaN."""
        return next(iter((~self.given.isfinite()).nonzero().view(-1).tolist()), -1)

    def end(self, result: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean; what was rounded off waits."""
        self.scheme.residuals.put(self.key, self.given - unpacked(packed(self.given), len(self.given)), self.unused)
        mean = (result / self.scheme.comm.size * self.scale).to(flat.dtype)
        return mean, mean


def packed(given: Tensor) -> Tensor:
    """uint8: the scale, then a bit an element."""
    bits = torch.from_numpy(np.packbits((given >= 0).numpy()))
    return torch.cat([given.abs().mean().view(1).view(torch.uint8), bits])


def unpacked(message: Tensor, numel: int) -> Tensor:
    """What a rank has sent."""
    signs = torch.from_numpy(np.unpackbits(message[4:].numpy(), count=numel)).float() * 2 - 1
    return message[:4].clone().view(torch.float32) * signs


def signs(comm: Communicator) -> Scheme:
    """For gradients of these ranks."""
    return Signs(comm)


SIGNS = WholeScheme(signs)  # may stand wherever an algorithm's name does


def train(comm: Communicator, algorithm: str | WholeScheme) -> str:
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
    for name, way in {"dense": "dense", "signs": SIGNS}.items():
        print(f"{name}: {SimulatedWorld(RANKS).run(partial(train, algorithm=way))[0]}")
