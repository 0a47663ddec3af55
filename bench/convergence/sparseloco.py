"""SparseLoCo's recipe (Sarfi et al., 2025): AdamW on each rank, and what a block of its steps changed sent sparsely.

As the example has it: of each chunk of 4,096 elements the share `density`, at least one, in 2 bits and 12 for the
place; an error that decays by 0.95; an outer SGD with rate 1, without momentum. Here τ = 15, where the paper's language
models take 15 to 250. Bytes are those of the messages, spread over the steps. On the way the model is the agreed one,
of the last block that has ended.
"""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from communicators import Communicator
from torch import nn

from bench.convergence.rank import Training
from bench.convergence.ways import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "sparseloco_digits.py"
TAU = 15


def training(run: Run, model: nn.Module, rate: float, comm: Communicator) -> Training:
    """One rank's."""
    example = _example()
    optimizer = example["sparseloco"](
        torch.optim.AdamW(model.parameters(), lr=rate),
        k=max(1, round(run.density * example["CHUNK"])),
        comm=comm,
        sync_every=TAU,
    )

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


@cache
def _example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))
