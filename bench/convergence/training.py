"""One training of a task, and what came of it: ranks are simulated in this process, those of torch's hooks are real."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from communicators import Communicator, Link, SimulatedWorld
from data_parallel import UpdateOptimizer
from torch import nn

from bench.convergence import eager, periodic, torch_hooks
from bench.convergence.rank import Point, Training, curve_of
from bench.convergence.tasks import DEVICE, TASKS
from bench.convergence.ways import WAYS, Run, Way, optimizer_of

LINKS = {"1 Gbit/s": Link(50e-6, 8e-9), "100 Mbit/s": Link(200e-6, 8e-8)}


def trained(run: Run, *, ways: Mapping[str, Way] = WAYS) -> dict[str, Any]:
    """score, by step and what was sent until then (`curve`), bytes a step of the busiest rank.

    And predicted network seconds a step, by link, and which kind of device computed.
    ways: what `run.way` is a name of.
    """
    way = ways[run.way]
    if way.by == "torch":
        curves = torch_hooks.curves(run)
    else:
        world = SimulatedWorld(run.ranks, link=LINKS["1 Gbit/s"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is written at first is warned about
            curves = world.run(lambda comm: _on_rank(run, way, comm))
    points = [_point(ranks) for ranks in zip(*curves, strict=True)]
    _, score, nbytes, messages = points[-1]
    return {
        "device": DEVICE.type,
        "score": score,
        "curve": points,
        "bytes_a_step": round(nbytes / run.steps),
        **{
            f"network_seconds_{name}": (messages * link.alpha + nbytes * link.beta) / run.steps
            for name, link in LINKS.items()
        },
    }


def _point(ranks: tuple[Point, ...]) -> Point:
    """Rank 0's score, and the bytes and messages of the busiest rank until then."""
    step, score, *_ = ranks[0]
    return step, score, max(point[2] for point in ranks), max(point[3] for point in ranks)


def _on_rank(run: Run, way: Way, comm: Communicator) -> list[Point]:
    made, clip_after = training_of(run, way, comm), run.clip if way.clips_after else 0.0
    return curve_of(run, made, rank=comm.rank, size=comm.size, clip_after=clip_after)


def training_of(run: Run, way: Way, comm: Communicator) -> Training:
    """One rank's. Those of torch are in the default process group, whatever `comm` is."""
    torch.manual_seed(run.seed)
    task = TASKS[run.task]
    model, rate = task.model().to(DEVICE), task.rates[run.optimizer]
    if way.by == "torch":
        return torch_hooks.training(run, model, rate)
    peers = {"periodic": periodic, "eager": eager}
    return peers[way.by].training(run, model, rate, comm) if way.by in peers else _ours(run, way, model, rate, comm)


def _ours(run: Run, way: Way, model: nn.Module, rate: float, comm: Communicator) -> Training:
    optimizer = optimizer_of(run, way, model, rate, comm)
    sent = lambda: (comm.bytes_sent, comm.messages_sent)  # noqa: E731
    made = Training(model, calls=model, optimizer=optimizer, step=optimizer.step, sent=sent)
    if isinstance(optimizer, UpdateOptimizer):
        return made._replace(around=optimizer.ahead) if way.ahead else made
    return made._replace(before_clipping=optimizer.synchronize)
