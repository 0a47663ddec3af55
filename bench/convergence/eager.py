"""Eager SGD on ranks of which one, drawn anew for each step, is late, as in its evaluation (Li et al., 2020).

A step takes a second of a simulated rank's time, a tenth more or less, and the late one's 0.64 more. So a rank's
gradient often goes into a later round: where ranks are alike, fewer do. Rates go by the gradients of all ranks, which
meet before the model is scored. The optimizer's momentum is that which a plan of `thinwire.advise` sets, or as with
dense training.
"""

from itertools import count
from typing import Literal

import torch
from communicators import Communicator
from partial_collectives import EagerSGD, injected_delays
from thinwire.advice.ways import for_late_gradients
from torch import nn

from bench.convergence.rank import Training, rates_of
from bench.convergence.ways import Run, inner_of

STEP, SPREAD, LATE = 1.0, 0.1, 0.64
SOLO, MAJORITY, AS_DENSE = "eager-solo", "eager-majority", "eager-majority, as dense"
QUORUMS: dict[str, Literal["solo", "majority"]] = {SOLO: "solo", MAJORITY: "majority", AS_DENSE: "majority"}


def training(run: Run, model: nn.Module, rate: float, comm: Communicator) -> Training:
    """One rank's."""
    inner = inner_of(run, model, rate)
    if run.way != AS_DENSE:
        for_late_gradients(inner)
    rates, quorum = rates_of(inner, run.steps), QUORUMS[run.way]
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
