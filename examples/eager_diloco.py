"""One engine for gradients and for pseudo-gradients: eager SGD and eager DiLoCo on scikit-learn's handwritten digits.

    python examples/eager_diloco.py

Four simulated ranks compute for 10 ms a step, one of them, drawn anew, for 40 ms more. Both ways sum by a
`PartialAllreduce`, whose rounds do not wait for the last rank: eager SGD the gradients of every step, eager DiLoCo what
a block of τ steps has changed, which an outer optimizer then takes for its gradient; eager Streaming DiLoCo does so by
fragments, in 4 bits, while ranks compute. local_sgd knows nothing of
partial_collectives: it is given what makes the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld
from local_sgd import DiLoCo, PeriodicAveraging, StreamingDiLoCo
from partial_collectives import EagerSGD, PartialAllreduce, injected_delays
from sklearn.datasets import load_digits
from torch import nn

RANKS, STEPS, BATCH, TAU = 4, 400, 16, 10
SECONDS, DELAY = 0.01, "random:1=0.04"


def eager_sgd(model: nn.Module, comm: Communicator, quorum: Any) -> EagerSGD:
    """A round a step."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return EagerSGD(inner, model.named_parameters(), comm=comm, quorum=quorum)


def eager_diloco(model: nn.Module, comm: Communicator, quorum: Any) -> DiLoCo:
    """A round a block. What comes late acts as momentum does: the outer optimizer has less of it than DiLoCo's 0.9."""
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = partial(torch.optim.SGD, lr=1.0, momentum=0.5, nesterov=True)
    return DiLoCo(inner, comm=comm, sync_every=TAU, outer=outer, allreduce=partial(PartialAllreduce, quorum=quorum))


def eager_streaming(model: nn.Module, comm: Communicator, quorum: Any) -> StreamingDiLoCo:
    """A round of a quarter of the model, four times a block, which is applied a step later."""
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = partial(torch.optim.SGD, lr=1.0, momentum=0.5, nesterov=True)
    rounds = partial(PartialAllreduce, quorum=quorum, compress="int4")
    return StreamingDiLoCo(inner, comm=comm, sync_every=TAU, fragments=4, delay=1, outer=outer, allreduce=rounds)


def train(comm: Communicator, make: Callable[..., Any], quorum: Any, steps: int = STEPS) -> tuple[float, float]:
    """Test accuracy, and virtual seconds."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    own, test = order[:1437][comm.rank :: comm.size], order[1437:]
    draw, held_up = torch.Generator().manual_seed(comm.rank), injected_delays(DELAY, comm.rank, comm.size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with make(model, comm, quorum) as optimizer:
        for step in range(steps):
            comm.elapse(SECONDS + held_up(step))
            batch = own[torch.randint(len(own), (BATCH,), generator=draw)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            if isinstance(optimizer, PeriodicAveraging):
                optimizer.average()
    return float((model(images[test]).argmax(1) == labels[test]).float().mean()), comm.clock()


WAYS = {"eager SGD": eager_sgd, "eager DiLoCo": eager_diloco, "eager Streaming DiLoCo": eager_streaming}


def main() -> None:
    """The table."""
    for name, make in WAYS.items():
        for quorum in (RANKS, "majority"):
            accuracy, seconds = SimulatedWorld(RANKS).run(partial(train, make=make, quorum=quorum))[0]
            print(f"{name:>22}, quorum {quorum:>8}: {accuracy:.1%} after {seconds:5.1f} s")


if __name__ == "__main__":
    main()
