"""Ways that average models: every rank takes steps of its own, and exchanges what a block of τ of them has changed.

DiLoCo with Muon inside is MuLoCo (Thérien et al., 2025). Outer momentum is 0.6, rates are 1/2 of the task's for AdamW
and 1 of that for Muon: of 0.6 and 0.9, and of 1/4, 1/2, 1 and 2, the best on text of 8 ranks with another seed, or 1 %
from it. SparseLoCo (Sarfi et al., 2025) sends an element about once in 1/density blocks: so it has short ones, and
"diloco often" as many, both at the task's rate; so do local SGD and Overlap-Local-SGD, every 4 steps, local
SGD after a tenth of the steps with an average each (post-local SGD, Lin et al., 2020). In 8 bits it is DiLoCo whose
outer step takes the mean as it is. Streaming DiLoCo exchanges a quarter of the model every 8 steps, during 4 of them.
DeMo has AdamW's rate: of 1/8, 1/4, 1/2, 1 and 2 of it the best on images and on text, with another seed.
Bytes are those of the messages, spread over the steps. On the way the model is the agreed one, of the last block that
has ended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from communicators import Communicator
from local_sgd import DeMo, DiLoCo, LocalSGD, OverlapLocalSGD, PeriodicAveraging, SparseLoCo, StreamingDiLoCo
from torch import nn

from bench.convergence.rank import Training
from bench.convergence.ways import WARM_UP, Run, inner_of

TAU, OFTEN, FOUR, EIGHT = 30, 5, 4, 8
ADAMWS_DECAY = 0.01  # torch's default
SHARES = {"adamw": 0.5, "muon": 1.0}
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
MEAN = partial(torch.optim.SGD, lr=1.0)


class Recipe(NamedTuple):
    """every: steps from one exchange to the next. make: (run, model, the task's rate, ranks) -> optimizer."""

    every: int
    make: Callable[[Run, nn.Module, float, Communicator], PeriodicAveraging]


def training(run: Run, model: nn.Module, rate: float, comm: Communicator) -> Training:
    """One rank's."""
    optimizer = RECIPES[run.way].make(run, model, rate, comm)

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


def _every(
    steps: int,
    kind: Callable[..., PeriodicAveraging],
    *,
    shared: bool = False,
    of_run: Callable[[Run], dict[str, Any]] = lambda run: {},
    **settings: Any,
) -> Recipe:
    """steps: of a block. shared: the rate is a share of the task's (`SHARES`). of_run: settings that depend on it."""

    def make(run: Run, model: nn.Module, rate: float, comm: Communicator) -> PeriodicAveraging:
        inner = inner_of(run, model, SHARES[run.optimizer] * rate if shared else rate)
        return kind(inner, comm=comm, **{"sync_every": steps} | settings | of_run(run))

    return Recipe(steps // settings.get("fragments", 1), make)


def _after_warm_up(run: Run) -> dict[str, Any]:
    return {"sync_every": lambda step: FOUR if step >= max(2, run.steps // WARM_UP) else 1}


def _demo(run: Run, model: nn.Module, rate: float, comm: Communicator) -> DeMo:
    return DeMo(torch.optim.SGD(model.parameters(), lr=rate), comm=comm, weight_decay=ADAMWS_DECAY)


_diloco = partial(_every, TAU, DiLoCo, shared=True, outer=OUTER)
_streaming = partial(_every, 4 * EIGHT, StreamingDiLoCo, shared=True, outer=OUTER, fragments=4, delay=EIGHT // 2)
RECIPES = {
    "local-sgd": _every(FOUR, LocalSGD, of_run=_after_warm_up),
    "local-sgd int8": _every(FOUR, DiLoCo, of_run=_after_warm_up, outer=MEAN, compress="int8"),
    "overlap-local-sgd": _every(FOUR, OverlapLocalSGD),
    "diloco": _diloco(),
    "diloco int2": _diloco(compress="int2"),
    "streaming-diloco": _streaming(),
    "streaming-diloco int2": _streaming(compress="int2"),
    "diloco often": _every(OFTEN, DiLoCo, outer=OUTER),
    "sparseloco": _every(OFTEN, SparseLoCo, of_run=lambda run: {"density": run.density}),
    "demo": Recipe(1, _demo),
}
PERIODS = {name: recipe.every for name, recipe in RECIPES.items()}
"""Steps from one exchange to the next."""
