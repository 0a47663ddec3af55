"""Eager SGD on ranks of which one, drawn anew for each step, is late, as in its evaluation (Li et al., 2020).

A step takes a second of a simulated rank's time, a tenth more or less, and the late one's 0.64 more. So a rank's
gradient often goes into a later round: where ranks are alike, fewer do. Rates go by the gradients of all ranks, which
meet before the model is scored. Late gradients act like momentum, so the optimizer has less of its own than the usual
0.9, but where the way's name says so.
"""

from itertools import count
from typing import Literal

import torch
from communicators import Communicator
from partial_collectives import EagerSGD, injected_delays
from torch import nn

from bench.convergence.rank import Training, rates_of
from bench.convergence.ways import MOMENTUM, Run, inner_of

STEP, SPREAD, LATE = 1.0, 0.1, 0.64
LESS = 0.5
WAYS: dict[str, tuple[Literal["solo", "majority"], float]] = {
    "eager-solo": ("solo", LESS),
    "eager-majority": ("majority", LESS),
    "eager-majority, momentum 0.9": ("majority", MOMENTUM),
}
"""Quorum, and SGD's momentum or AdamW's first beta."""


def training(run: Run, model: nn.Module, rate: float, comm: Communicator) -> Training:
    """One rank's."""
    quorum, momentum = WAYS[run.way]
    inner = inner_of(run, model, rate, momentum=momentum, beta1=momentum)
    rates = rates_of(inner, run.steps)
    eager = EagerSGD(inner, model.named_parameters(), comm=comm, scheduler=rates, quorum=quorum, seed=run.seed)
    late = injected_delays(f"random:1={LATE}", comm.rank, comm.size, seed=run.seed)
    taken, draw = count(), torch.Generator().manual_seed(run.seed * run.ranks + comm.rank)

    def step() -> None:
        spread = SPREAD * (2 * float(torch.rand((), generator=draw)) - 1)
        comm.elapse(STEP + spread + late(next(taken)))
        eager.step()

    def finish() -> None:
        eager.finish()
        eager.close()

    sent = lambda: (comm.bytes_sent, comm.messages_sent)  # noqa: E731
    return Training(
        model, calls=model, optimizer=eager, step=step, sent=sent, rates=False, meet=eager.synchronize, finish=finish
    )
