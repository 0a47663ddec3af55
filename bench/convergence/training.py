"""One training of a task in one process, its ranks simulated; what came of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from communicators import Communicator, Link, SimulatedWorld
from torch import nn

from bench.convergence.tasks import TASKS, Task
from bench.convergence.ways import WAYS, Run, Way, optimizer_of

LINKS = {"1 Gbit/s": Link(50e-6, 8e-9), "100 Mbit/s": Link(200e-6, 8e-8)}
POINTS = 6  # of a curve
Point = tuple[int, float, int, int]
"""Steps that were taken, the score after them, bytes and messages that a rank has sent in them."""


def trained(run: Run, *, ways: Mapping[str, Way] = WAYS) -> dict[str, Any]:
    """score, by step and what was sent until then (`curve`), bytes a step of the busiest rank.

    And predicted network seconds a step, by link.
    ways: what `run.way` is a name of.
    """
    task = TASKS[run.task]
    world = SimulatedWorld(run.ranks, link=LINKS["1 Gbit/s"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is written at first is warned about
        curves = world.run(lambda comm: _on_rank(run, ways[run.way], task, comm))
    nbytes, messages = max(world.bytes_sent) / run.steps, max(world.messages_sent) / run.steps
    return {
        "score": curves[0][-1][1],
        "curve": [_point(ranks) for ranks in zip(*curves, strict=True)],
        "bytes_a_step": round(nbytes),
        **{f"network_seconds_{name}": messages * link.alpha + nbytes * link.beta for name, link in LINKS.items()},
    }


def _point(ranks: tuple[Point, ...]) -> Point:
    """Rank 0's score, and the bytes and messages of the busiest rank until then."""
    step, score, *_ = ranks[0]
    return step, score, max(point[2] for point in ranks), max(point[3] for point in ranks)


def _on_rank(run: Run, way: Way, task: Task, comm: Communicator) -> list[Point]:
    torch.manual_seed(run.seed)
    model = task.model()
    optimizer = optimizer_of(run, way, model, task.rates[run.optimizer], comm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, run.steps))
    after = run.clip if way.clips_after else 0.0
    ahead = way.ahead and way.settings(run).get("sends") == "updates"
    every, curve = max(1, run.steps // POINTS), []
    for step in range(run.steps):
        optimizer.zero_grad()
        with optimizer.ahead() if ahead else nullcontext():
            task.loss(model, seed=run.seed, rank=comm.rank, size=comm.size, step=step).backward()  # type: ignore[no-untyped-call]
        if after:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), after)
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == run.steps:
            score = task.score(model) if comm.rank == 0 else math.nan
            curve.append((step + 1, score, comm.bytes_sent, comm.messages_sent))
    return curve


def _rate(step: int, steps: int) -> float:
    """Linear over the first twentieth, then a cosine."""
    return min(1.0, (step + 1) / max(1, steps // 20)) * 0.5 * (1 + math.cos(math.pi * step / steps))
