"""What is compared: ways to exchange, each with the settings that an optimizer asks for, or as first written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from communicators import Communicator
from data_parallel import DistributedOptimizer, UpdateOptimizer
from replicas import MuonAdamW
from sparse_collectives import Algorithm, ARCTopK
from sparse_compress import DGCTopK, WarmUp
from torch import nn
from torch.optim import Optimizer

from bench.convergence.largest_of_the_sum import LargestOfTheSum

OPTIMIZERS = ("sgd", "adamw", "muon")
MOMENTUM = 0.9
BETA1, BETA1_WAITING = 0.9, 0.5  # AdamW's own default, and where updates wait
WARM_UP = 10  # a tenth of the steps, dense
TORCHFT = "torchft DiLoCo"  # a way where torchft is installed, as by hatch run peers:bench
TINY = 256  # elements: biases and norms of these models, not their matrices


@dataclass(frozen=True)
class Run:
    """What one training is. clip: of the norm of the mean gradient, 0 for none; steps: of the whole training."""

    task: str
    optimizer: str
    way: str
    density: float
    clip: float
    ranks: int
    seed: int
    steps: int


@dataclass(frozen=True)
class Way:
    """settings: (run) -> what the optimizer is given, and "updates" for an UpdateOptimizer.

    own_momentum: SGD has its own; for updates it always does.
    selects: by a density. ahead: of updates, whether gradients are made with what waits.

    clips_after: as plain training does, between the exchange and the step. optimizers: that it is for. advised:
    algorithm and wire, where it is what `advise` says. by: what trains, ours,
    "torch", "periodic" or "eager" (`torch_hooks`, `periodic`, `eager`; by the way's name). beta1: of AdamW, where it is
    not what fits the settings.
    """

    settings: Callable[[Run], Mapping[str, Any]]
    own_momentum: bool = False
    selects: bool = True
    ahead: bool = True
    clips_after: bool = False
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    advised: tuple[str, str] | None = None
    by: str = "ours"
    beta1: float | None = None


def _whole(**settings: Any) -> Way:
    return Way(lambda run: settings, own_momentum=True, selects=False, clips_after=True, optimizers=OPTIMIZERS)


def _low_rank(rank: int) -> Way:
    """The first tenth of the steps dense, as with torch's hook."""

    def settings(run: Run) -> dict[str, Any]:
        return {"algorithm": "powersgd", "options": {"rank": rank, "dense_steps": max(2, run.steps // WARM_UP)}}

    return replace(_whole(), settings=settings, advised=(f"powersgd rank={rank}", "fp32"))


def _peer(by: str, **more: Any) -> Way:
    return Way(lambda run: {}, own_momentum=True, clips_after=True, by=by, **more)


def _torch(advised: str = "") -> Way:
    return _peer("torch", selects=False, advised=(advised, "fp32") if advised else None)


def _periodic(advised: str, *, selects: bool = False, optimizers: tuple[str, ...] = ("adamw", "muon")) -> Way:
    return _peer("periodic", selects=selects, optimizers=optimizers, advised=(advised, "fp32"))


def _clip(run: Run) -> dict[str, Any]:
    return {"clip_norm": run.clip} if run.clip else {}


def fitting(run: Run, algorithm: str | Algorithm = "gtopk", **more: Any) -> dict[str, Any]:
    """The settings that the README recommends."""
    density = WarmUp.recommended(run.density, run.steps)
    updates = {"updates": True, "dense_below": TINY}
    return {"algorithm": algorithm, "density": density, **updates, **_clip(run), **more}


def _dense_tenth(run: Run) -> dict[str, Any]:
    """What the README recommends from 1 % on."""
    return fitting(run, density=WarmUp(run.density, steps=run.steps // WARM_UP, stages=(1.0,)))


def _momentum_before(run: Run) -> dict[str, Any]:
    """Gradients are sent, after the correction: what a DDP hook can do."""
    density = WarmUp.recommended(run.density, run.steps)
    return {"algorithm": "gtopk", "density": density, "momentum": MOMENTUM, **_clip(run)}


def _as_first_written(run: Run) -> dict[str, Any]:
    own = {"momentum": MOMENTUM} if run.optimizer == "sgd" else {}
    return {"algorithm": "gtopk", "density": run.density, **own}


def _dgc(run: Run) -> dict[str, Any]:
    """As its authors state it: momentum correction, masking, local clipping, exponential warm-up, sampled top-k."""
    density = WarmUp(run.density, steps=run.steps // 5)
    return {
        "algorithm": "topk-allgather",
        "density": density,
        "compressor": DGCTopK(run.density),
        "momentum": MOMENTUM,
        **_clip(run),
    }


def _by(algorithm: str, wire: str = "fp32") -> Way:
    return Way(lambda run: fitting(run, algorithm, wire=wire), advised=(algorithm, wire))


WAYS: dict[str, Way] = {
    "dense": _whole(algorithm="dense"),
    "dense, beta1 0.5": replace(_whole(algorithm="dense"), beta1=BETA1_WAITING, optimizers=("adamw",)),
    "dense bf16": _whole(algorithm="dense", wire="bf16"),
    "powersgd": _low_rank(2),
    "powersgd rank 4": _low_rank(4),
    "dense-int8": replace(_whole(algorithm="dense-int8"), advised=("dense-int8", "fp32")),
    "gtopk, as first written": Way(_as_first_written, clips_after=True),
    "gtopk": _by("gtopk"),
    "gtopk, dense tenth": Way(_dense_tenth),
    "gtopk, no warm-up": Way(lambda run: fitting(run, density=run.density)),
    "gtopk, not ahead": Way(fitting, ahead=False),
    "gtopk, beta1 0.9": Way(fitting, beta1=BETA1, optimizers=("adamw",)),
    "gtopk, momentum before": Way(_momentum_before, optimizers=("sgd",), advised=("gtopk", "fp32")),
    "gtopk, momentum twice": Way(_as_first_written, own_momentum=True, clips_after=True, optimizers=("sgd",)),
    "gtopk int8-packed": _by("gtopk", wire="int8-packed"),
    "topk-allgather": _by("topk-allgather"),
    "topk-allgather int8-packed": _by("topk-allgather", wire="int8-packed"),
    "topk-dsa": _by("topk-dsa"),
    "oktopk": _by("oktopk"),
    "spardl": _by("spardl"),
    "spardl int8-packed": _by("spardl", wire="int8-packed"),
    "spardl teams=2": Way(lambda run: fitting(run, "spardl", options={"teams": 2})),
    "spardl teams=2 int8-packed": Way(lambda run: fitting(run, "spardl", options={"teams": 2}, wire="int8-packed")),
    "arc-topk": Way(lambda run: fitting(run, ARCTopK())),
    "largest of the sum": Way(lambda run: fitting(run, LargestOfTheSum())),
    "dgc": Way(_dgc, optimizers=("sgd",)),
    "torch DDP": _torch(),
    "torch bf16 hook": _torch(),
    "torch PowerSGD hook": _torch("torch-powersgd rank=2"),
    **{f"torch PowerSGD hook rank {rank}": _torch(f"torch-powersgd rank={rank}") for rank in (1, 4, 8)},
    "torch PostLocalSGD": _torch("torch-local-sgd sync_every=4"),
    **({TORCHFT: replace(_torch(), optimizers=("adamw",))} if find_spec("torchft") else {}),
    "local-sgd": _periodic("local-sgd sync_every=4", optimizers=OPTIMIZERS),
    "local-sgd int8": _periodic("local-sgd sync_every=4 compress=int8", optimizers=OPTIMIZERS),
    "overlap-local-sgd": _periodic("overlap-local-sgd sync_every=4", optimizers=OPTIMIZERS),
    "diloco": _periodic("diloco sync_every=30"),
    "diloco int2": _periodic("diloco sync_every=30 compress=int2"),
    "streaming-diloco": _periodic("streaming-diloco sync_every=32"),
    "streaming-diloco int2": _periodic("streaming-diloco sync_every=32 compress=int2"),
    "diloco often": _periodic("diloco sync_every=5"),
    "sparseloco": _periodic("sparseloco sync_every=5", selects=True),
    **{name: _peer("eager", selects=False, advised=(name, "fp32")) for name in ("eager-solo", "eager-majority")},
    "eager-majority, as dense": _peer("eager", selects=False),
    "demo": _peer("periodic", selects=False, optimizers=("adamw",)),
}


def optimizer_of(
    run: Run, way: Way, model: nn.Module, rate: float, comm: Communicator
) -> DistributedOptimizer | UpdateOptimizer:
    """The optimizer of a run that goes this way."""
    settings = dict(way.settings(run))
    updates = settings.pop("updates", False)
    beta1 = way.beta1 or (BETA1_WAITING if updates else BETA1)
    inner = inner_of(run, model, rate, momentum=MOMENTUM if way.own_momentum or updates else 0.0, beta1=beta1)
    kind = UpdateOptimizer if updates else DistributedOptimizer
    return kind(inner, model.named_parameters(), comm=comm, **settings)


def inner_of(run: Run, model: nn.Module, rate: float, *, momentum: float = MOMENTUM, beta1: float = BETA1) -> Optimizer:
    """The optimizer of each rank; momentum: SGD's. Muon is for transformers."""
    if run.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=(beta1, 0.999))
    if run.optimizer == "muon":
        return MuonAdamW(model, lr=rate, weight_decay=0.01, adamw=["places", "head"])
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
