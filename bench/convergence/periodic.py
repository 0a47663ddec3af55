"""Ways that average models: every rank takes steps of its own, and exchanges what a block of τ of them has changed.

DiLoCo with Muon inside is MuLoCo (Thérien et al., 2025). Outer momentum is 0.6, rates are 1/2 of the task's for AdamW
and 1 of that for Muon: of 0.6 and 0.9, and of 1/4, 1/2, 1 and 2, the best on text of 8 ranks with another seed, or 1 %
from it. SparseLoCo's recipe (Sarfi et al., 2025) is the example's: of each chunk of 4,096 elements the share `density`,
at least one, in 2 bits and 12 for the place; an error that decays by 0.95; an outer SGD with rate 1, without momentum.
Its τ is 15, where the paper's language models take 15 to 250. Bytes are those of the messages, spread over the steps.
On the way the model is the agreed one, of the last block that has ended.
"""

import runpy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from communicators import Communicator
from local_sgd import DiLoCo, PeriodicAveraging
from torch import nn

from bench.convergence.rank import Training
from bench.convergence.ways import Run, inner_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "sparseloco_digits.py"
TAU, TAU_SPARSE = 30, 15
SHARES = {"adamw": 0.5, "muon": 1.0}
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)

Make = Callable[[Run, nn.Module, float, Communicator], PeriodicAveraging]


def training(run: Run, model: nn.Module, rate: float, comm: Communicator) -> Training:
    """One rank's."""
    optimizer = RECIPES[run.way](run, model, rate, comm)

    def step() -> None:
        optimizer.step()
        optimizer.average()

    return Training(
        model,
        calls=model,
        optimizer=optimizer,
        step=step,
        sent=lambda: (comm.bytes_sent, comm.messages_sent),
        agreed=optimizer.averaged_model,
        finish=optimizer.finish,
    )


def _diloco(compress: str | None = None) -> Make:
    def make(run: Run, model: nn.Module, rate: float, comm: Communicator) -> PeriodicAveraging:
        inner = inner_of(run, model, SHARES[run.optimizer] * rate)
        return DiLoCo(inner, comm=comm, sync_every=TAU, outer=OUTER, compress=compress)

    return make


def _sparseloco(run: Run, model: nn.Module, rate: float, comm: Communicator) -> PeriodicAveraging:
    example = _example()
    optimizer: PeriodicAveraging = example["sparseloco"](
        torch.optim.AdamW(model.parameters(), lr=rate),
        k=max(1, round(run.density * example["CHUNK"])),
        comm=comm,
        sync_every=TAU_SPARSE,
    )
    return optimizer


RECIPES: dict[str, Make] = {
    "diloco": _diloco(),
    "diloco int2": _diloco("int2"),
    "sparseloco": _sparseloco,
}


@cache
def _example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))
