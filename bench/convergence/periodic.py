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


def _diloco(run: Run, model: nn.Module, rate: float, comm: Communicator, *, compress: str | None = None) -> DiLoCo:
    inner = inner_of(run, model, SHARES[run.optimizer] * rate)
    return DiLoCo(inner, comm=comm, sync_every=TAU, outer=OUTER, compress=compress)


def _streaming(
    run: Run, model: nn.Module, rate: float, comm: Communicator, *, compress: str | None = None
) -> StreamingDiLoCo:
    inner, every = inner_of(run, model, SHARES[run.optimizer] * rate), 4 * EIGHT
    return StreamingDiLoCo(
        inner, comm=comm, sync_every=every, fragments=4, delay=EIGHT // 2, outer=OUTER, compress=compress
    )


def _often(run: Run, model: nn.Module, rate: float, comm: Communicator) -> DiLoCo:
    return DiLoCo(inner_of(run, model, rate), comm=comm, sync_every=OFTEN, outer=OUTER)


def _sparseloco(run: Run, model: nn.Module, rate: float, comm: Communicator) -> SparseLoCo:
    return SparseLoCo(inner_of(run, model, rate), comm=comm, sync_every=OFTEN, density=run.density)


def _after_warm_up(run: Run) -> Callable[[int], int]:
    return lambda step: FOUR if step >= max(2, run.steps // WARM_UP) else 1


def _local(run: Run, model: nn.Module, rate: float, comm: Communicator) -> LocalSGD:
    return LocalSGD(inner_of(run, model, rate), comm=comm, sync_every=_after_warm_up(run))


def _local_int8(run: Run, model: nn.Module, rate: float, comm: Communicator) -> DiLoCo:
    inner, mean = inner_of(run, model, rate), partial(torch.optim.SGD, lr=1.0)
    return DiLoCo(inner, comm=comm, sync_every=_after_warm_up(run), outer=mean, compress="int8")


def _overlap(run: Run, model: nn.Module, rate: float, comm: Communicator) -> OverlapLocalSGD:
    return OverlapLocalSGD(inner_of(run, model, rate), comm=comm, sync_every=FOUR)


def _demo(run: Run, model: nn.Module, rate: float, comm: Communicator) -> DeMo:
    return DeMo(torch.optim.SGD(model.parameters(), lr=rate), comm=comm, weight_decay=ADAMWS_DECAY)


RECIPES: dict[str, Make] = {
    "local-sgd": _local,
    "local-sgd int8": _local_int8,
    "overlap-local-sgd": _overlap,
    "diloco": _diloco,
    "diloco int2": partial(_diloco, compress="int2"),
    "streaming-diloco": _streaming,
    "streaming-diloco int2": partial(_streaming, compress="int2"),
    "diloco often": _often,
    "sparseloco": _sparseloco,
    "demo": _demo,
}
PERIODS = {
    "local-sgd": FOUR,
    "local-sgd int8": FOUR,
    "overlap-local-sgd": FOUR,
    "diloco": TAU,
    "diloco int2": TAU,
    "streaming-diloco": EIGHT,
    "streaming-diloco int2": EIGHT,
    "diloco often": OFTEN,
    "sparseloco": OFTEN,
    "demo": 1,
}
"""Steps from one exchange to the next."""
