"""Seconds of a training's steps, measured by real ranks behind an emulated link, ways taking turns.

A training has phases: all is sent at first, then little; ranks take steps alone, then average. What is measured is a
`Case`, a way at one density without any warm-up, over a whole period of steps; `until` adds up those of a training.
"""

import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import thinwire
import torch
import torch.distributed as dist
from data_parallel import SparseHookState, UpdateOptimizer
from slow_link import open_link
from slow_link.throttled import behind_link
from sparse_collectives import Prediction
from sparse_compress import WarmUp
from thinwire.advice.ways import TORCH_BF16
from torch.nn.parallel import DistributedDataParallel

from bench.convergence import periodic, torch_hooks
from bench.convergence.rank import Training
from bench.convergence.tasks import DEVICE, TASKS
from bench.convergence.training import training_of
from bench.convergence.ways import WARM_UP, WAYS, Run, inner_of
from bench.real_ranks import found_by, tell
from bench.turns import in_turns, seconds_of

JOURNAL = "time-to-quality-seconds.jsonl"
ALONE, DDP, DENSE, BF16, SELECTION = "alone", "torch DDP", "dense", "dense bf16", "gtopk"
FIRST, TURNS = 3, 3  # steps before all turns, at least, and turns that are measured, after one that is not
LASTS = 2.0  # seconds of a turn, at least: after another way's turn, the first steps take longer than later ones
UPDATES_PERIOD = 8  # steps of an UpdateOptimizer, in one of which ranks tell each other of their gradients' noise
FIRST_OF = {"local-sgd": DENSE, "local-sgd int8": "dense-int8"}  # what sends as much as their warm-ups
NO_WARM_UP = 4  # steps of a training, of which a tenth is none
LIMIT = 3600  # seconds that all ways of a cell may take

Seconds = dict[str, list[float]]
"""Of a step in each turn, by `Case.name`."""


class Cell(NamedTuple):
    """Where trainings are compared."""

    task: str
    optimizer: str
    ranks: int
    mbit: float
    ms: float


class Case(NamedTuple):
    """What sends the same in all of its periods."""

    way: str
    density: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.way} at {self.density:g}"


class Measured(NamedTuple):
    """Of a cell. advised: what `thinwire.advise` says on the same ranks; None if it is none of the cases."""

    seconds: Seconds
    advised: Case | None


def phases(run: Run) -> list[Case]:
    """The case of each step; dense steps of all selections are one case, and those in int8 another."""
    way, tenth = WAYS[run.way], max(2, run.steps // WARM_UP)
    if way.by == "ours" and way.selects:
        density = WarmUp.recommended(run.density, run.steps)
        dense = f"{SELECTION} int8-packed" if "int8" in run.way else SELECTION
        return [Case(dense if density(step) == 1 else run.way, density(step)) for step in range(run.steps)]
    first = FIRST_OF.get(run.way) or {"torch": DDP, "ours": DENSE}.get(way.by, run.way)
    warms = "powersgd" in run.way.lower() or run.way in (torch_hooks.LOCAL, *FIRST_OF)
    return [Case(first if warms and step < tenth else run.way, run.density) for step in range(run.steps)]


def until(run: Run, seconds: Seconds, *, turn: Callable[[Sequence[float]], float] = statistics.median) -> list[float]:
    """Seconds from the first step to the end of each, beginning with 0 before it. turn: which of the turns counts."""
    of = {name: turn(turns) for name, turns in seconds.items()}
    return list(accumulate((of[case.name] for case in phases(run)), initial=0.0))


def measured(cell: Cell, cases: Sequence[Case], folder: Path) -> Measured:
    """Of all cases, and of a rank that exchanges nothing (`ALONE`): from the record, if it has all, or anew."""
    for found in on_record(cell, folder):
        if {case.name for case in cases} <= found.seconds.keys():
            return found
    told = _on_ranks(cell, on_rank, cell, cases)
    advised, of = told[0]["advised"], [one["seconds"] for one in told]
    seconds = {name: [max(turn) for turn in zip(*(one[name] for one in of), strict=True)] for name in of[0]}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / JOURNAL).open("a") as file:
        kept = {"cell": cell, "first": told[0]["first"], "seconds": seconds, "advised": advised}
        file.write(json.dumps(kept) + "\n")
    return Measured(seconds, advised and Case(*advised))


def on_record(cell: Cell, folder: Path) -> list[Measured]:
    """What was measured of a cell, the latest first."""
    path = folder / JOURNAL
    lines = map(json.loads, reversed(path.read_text().splitlines())) if path.exists() else ()
    mine = [kept for kept in lines if kept["cell"] == list(cell)]
    return [Measured(kept["seconds"], Case(*kept["advised"]) if kept.get("advised") else None) for kept in mine]


def whole(cell: Cell, run: Run) -> list[float]:
    """Seconds of all steps of one training, none left out."""
    return [max(of) for of in zip(*_on_ranks(cell, all_steps, cell, asdict(run)), strict=True)]


def _on_ranks(cell: Cell, part: Callable[..., None], *arguments: Any) -> list[Any]:
    with open_link(ranks=cell.ranks, mbit_per_second=cell.mbit, milliseconds=cell.ms) as link:
        return found_by(link, part, *arguments, mpi=False, timeout=LIMIT, first=True)


def on_rank(asked: Sequence[Any], cases: Iterable[Sequence[Any]]) -> None:
    """One rank's part, in a process group: what it took."""
    cell, trainings, turns = Cell(*asked), [], {}
    for case in [Case(ALONE), *(Case(*case) for case in cases)]:
        trainings.append(_training(cell, case))
        steps = Steps(trainings[-1], cell, seed=0)
        turns[case.name] = partial(steps.seconds, _turn(steps, _period(case.way, trainings[-1].optimizer)))
    found = in_turns(turns, TURNS, before=dist.barrier)
    for training in trainings:
        training.finish()
    advised = _advised(cell, statistics.median(found[Case(ALONE).name]))
    tell({"seconds": found, "advised": advised, "first": os.sched_getscheduler(0) == os.SCHED_FIFO})


def _advised(cell: Cell, alone: float) -> Case | None:
    """What `thinwire.advise` says to these ranks, each of which computes a step in `alone` seconds. Collective.

    The model is in DDP, so that torch's ways may be said too; "leave it off" leaves DDP.
    """
    task = TASKS[cell.task]
    ddp = DistributedDataParallel(task.model())
    said = thinwire.advise(ddp, steps_per_second=1 / alone, optimizer=cell.optimizer, data=task.data)
    return case_of(said.recommendation.step.prediction)


def case_of(advised: Prediction) -> Case | None:
    """The case that is trained as `thinwire.advise` says; None if it is none of `WAYS`."""
    if whole := {DENSE: DDP, TORCH_BF16: "torch bf16 hook"}.get(advised.name):
        return Case(whole)
    known = (name for name, way in WAYS.items() if way.advised == (advised.variant, advised.wire))
    exact = advised.variant if advised.wire == "fp32" else f"{advised.variant} {advised.wire}"
    name = exact if exact in WAYS else next(known, None)
    return None if name is None else Case(name, advised.density)


def _training(cell: Cell, case: Case) -> Training:
    """What takes the steps of a case. Our sum in bf16 is DDP's hook here, as advised; the record has it without DDP."""
    run = Run(cell.task, cell.optimizer, case.way, case.density, 0.0, cell.ranks, 0, NO_WARM_UP)
    if case.way in (ALONE, BF16):
        model, rate = TASKS[cell.task].model().to(DEVICE), TASKS[cell.task].rates[cell.optimizer]
        inner, calls = inner_of(run, model, rate), model
        if case.way == BF16:
            calls = DistributedDataParallel(model)
            SparseHookState.for_model(calls, inner, algorithm=DENSE, wire="bf16")
        return Training(model, calls=calls, optimizer=inner, step=inner.step, sent=lambda: (0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return training_of(run, WAYS[case.way], behind_link())


class Steps:
    """Steps of a training on this rank."""

    def __init__(self, training: Training, cell: Cell, seed: int) -> None:
        self._training, self._cell, self._seed, self._taken = training, cell, seed, 0

    def take(self, count: int) -> None:
        """The next ones."""
        task, training = TASKS[self._cell.task], self._training
        for step in range(self._taken, self._taken + count):
            training.optimizer.zero_grad()
            with training.around():
                batch = {"seed": self._seed, "rank": dist.get_rank(), "size": self._cell.ranks, "step": step}
                task.loss(training.calls, **batch).backward()  # type: ignore[no-untyped-call]
            training.step()
        self._taken += count

    def seconds(self, count: int) -> float:
        """Of one of the next `count`."""
        return seconds_of(partial(self.take, count)) / count


def _turn(steps: Steps, period: int) -> int:
    """Steps of a turn: whole periods, as many as take `LASTS` on the slowest rank. Takes the `FIRST` ones."""
    steps.take(max(1, FIRST - period))
    taken = torch.tensor(period * steps.seconds(period))
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return period * math.ceil(LASTS / taken.item())


def _period(way: str, optimizer: Any) -> int:
    """Steps until it begins anew."""
    usual = UPDATES_PERIOD if isinstance(optimizer, UpdateOptimizer) else 1
    return (periodic.PERIODS | torch_hooks.PERIODS).get(way, usual)


def all_steps(asked: Sequence[Any], run: dict[str, Any]) -> None:
    """One rank's part in a training: tells what its steps took together, in a process that has taken some alone before.

    Each process imports, once, what torch needs for a first step: seconds, which are not of a way.
    """
    cell, chosen = Cell(*asked), Run(**run)
    Steps(_training(cell, Case(ALONE)), cell, chosen.seed).take(FIRST)
    training = training_of(chosen, WAYS[chosen.way], behind_link())
    dist.barrier()
    tell([chosen.steps * Steps(training, cell, chosen.seed).seconds(chosen.steps)])
    training.finish()
