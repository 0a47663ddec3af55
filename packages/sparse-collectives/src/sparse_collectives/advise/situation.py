"""What advise bases its advice on: measured on the ranks that it was started with, or assumed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from communicators import Communicator, Link, as_communicator, barrier, measure_link
from communicators.alone import Alone

from sparse_collectives.advise.flags import LINKS
from sparse_collectives.calibration import measure_handling, measure_traffic, slowest
from sparse_collectives.cost import BACKWARD_SHARE, Handling, Prediction, predict_all, step_seconds
from sparse_collectives.wire import WIRES

REPEATS = 3


class NoAdvice(Exception):  # noqa: N818 - it is what the command says
    """What was asked for cannot be found out; the text says why and what to do."""


@dataclass(frozen=True)
class Situation:
    """numel: trained parameters. ranks: P. device: where gradients are.

    compute: seconds of forward and backward. hidden: seconds of them during which buckets travel, 0 without overlap.
    link: α and β of the exchange. link_name: as given, or "measured". pairs: α and β of ping-pong in pairs, if
    measured. handling: a rank's own costs by density.
    """

    numel: int
    ranks: int
    device: str
    compute: float
    hidden: float
    link: Link
    link_name: str
    pairs: Link | None
    handling: dict[float, Handling]

    def predictions(self) -> list[tuple[Prediction, float]]:
        """All exchanges, each with the seconds of its step, fastest step first; of each only the fastest variant.

        Their wires are those on which merging was measured, and fp32.
        """
        found = predict_all(size=self.ranks, numel=self.numel, link=self.link, handling=self.handling)
        steps = [(p, step_seconds(p, compute=self.compute, backward=self.hidden)) for p in found]
        fastest: dict[tuple[str, float, str], tuple[Prediction, float]] = {}
        for p, step in sorted(steps, key=lambda pair: pair[1]):
            fastest.setdefault((p.algorithm, p.density, p.wire), (p, step))
        return list(fastest.values())

    def elsewhere(self, *, link: Link | None = None, ranks: int | None = None) -> Situation:
        """The same training on another network."""
        return replace(self, link=link or self.link, ranks=ranks or self.ranks)


def find_out(flags: argparse.Namespace) -> tuple[Situation, Communicator]:
    """The situation, alike on every rank. Collective, unless a link is assumed. Raises NoAdvice."""
    comm = Alone() if flags.link else _communicator()
    if comm.size == 1 and not flags.link:
        raise NoAdvice(
            "one rank: there is no network to measure. Start several with mpiexec -n P (needs mpi4py) or "
            f"torchrun --nproc-per-node P, or assume a network: --link {'|'.join(LINKS)} --ranks P"
        )
    device = _device(flags.device, comm)
    if flags.model:
        numel, compute, backward = _model_seconds(flags.model, comm, device)
    else:
        numel, compute, backward = flags.parameters, flags.step_seconds, BACKWARD_SHARE * flags.step_seconds
    size = flags.ranks or comm.size
    costs: dict[str, Any] = {"numel": numel, "device": device, "size": size, "wires": WIRES}
    handling = {density: measure_handling(comm, density=density, **costs) for density in flags.density}
    situation = Situation(
        numel=numel,
        ranks=size,
        device=device.type,
        compute=compute,
        hidden=0.0 if flags.no_overlap else backward,
        link=LINKS[flags.link] if flags.link else measure_traffic(comm),
        link_name=flags.link or "measured",
        pairs=None if flags.link else measure_link(comm),
        handling=handling,
    )
    return situation, comm


def _communicator() -> Communicator:
    """The ranks that a launcher started: torchrun's over gloo, else MPI's where mpi4py is there."""
    if dist.is_available() and dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        with contextlib.suppress(ImportError, RuntimeError):  # RuntimeError: mpi4py is there, an MPI library is not
            from mpi4py import MPI  # noqa: F401 - its import is what as_communicator looks for
    try:
        return as_communicator(None)
    except RuntimeError as error:
        raise NoAdvice(str(error)) from error


def _device(name: str | None, comm: Communicator) -> torch.device:
    if name is None and torch.cuda.is_available():
        return torch.device("cuda", comm.rank % torch.cuda.device_count())
    try:
        return torch.empty(0, device=name or "cpu").device
    except (RuntimeError, AssertionError) as error:
        raise NoAdvice(f"--device {name}: {str(error).partition(chr(10))[0]}") from error


def _model_seconds(name: str, comm: Communicator, device: torch.device) -> tuple[int, float, float]:
    """Trained parameters, seconds of forward and backward, seconds of backward; of the slowest rank."""
    model, loss = _made(name, device)
    times = []
    for _ in range(REPEATS + 1):
        model.zero_grad()
        barrier(comm)
        begin = _now(comm, device)
        value = loss()
        middle = _now(comm, device)
        value.backward()  # type: ignore[no-untyped-call]
        times.append((middle - begin, _now(comm, device) - middle))
    forward, backward = slowest([statistics.median(part) for part in zip(*times[1:], strict=True)], comm)
    return sum(p.numel() for p in model.parameters() if p.requires_grad), forward + backward, backward


def _made(name: str, device: torch.device) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """What FACTORY() returns. Its own errors are the user's to see as they are."""
    module, _, factory = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise NoAdvice(f"--model {name}: {error}; the module must be importable from here") from error
    with device:
        made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise NoAdvice(f"--model {name}: it returned {type(made).__name__}, expected (model, loss); see --help")
    return made


def _now(comm: Communicator, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return comm.clock()
