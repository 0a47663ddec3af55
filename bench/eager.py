"""Time to the same accuracy under imbalance that is fixed in advance: eager SGD against synchronous SGD.

    python -m bench eager [--tasks digits lstm speech] [--seeds N] [--full] [--output DIR]

Simulated ranks train each task of `bench.eager_tasks`, which says how long steps take. seconds: virtual, until the test
accuracy first reaches the target, looked at every few rounds. whole: until all ranks have made all steps. speed-ups:
against synchronous; ideal: the bound for this imbalance, if every rank went on at its own mean pace. accuracy: at the
end, where all have been as often through the data. Medians of the seeds.

Then the digits on real ranks behind an emulated link, see `bench.eager_on_ranks`: `ranks` in the .json.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld
from partial_collectives import EagerSGD

from bench.eager_on_ranks import on_ranks
from bench.eager_tasks import TASKS, Task, ideal
from bench.record import asked, parser_of, record

LABELS = ("task", "how")
COLUMNS, VALUES = ("seconds", "whole", "accuracy", "rounds"), ("speedup", "whole_speedup", "ideal")

AGAINST = "synchronous SGD with the same delays, and the bound for them"


def main(argv: Sequence[str] = ()) -> None:
    """Trains, prints the table."""
    parser = parser_of("eager", __doc__, full="the numbers to report")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3")
    parser.add_argument("--steps", type=int, help="of real ranks; default 40, with --full 200; 0: none")
    options = asked(parser, argv, seeds=(1, 3), steps=(40, 200))
    rows = (row for name in options.tasks for row in _compared(TASKS[name], options.seeds))
    more: dict[str, Any] = {"ranks": on_ranks(options.steps)} if options.steps else {}
    shown = (*LABELS, *COLUMNS, *VALUES)
    record(options, rows, labels=LABELS, values=VALUES, against=AGAINST, shown=shown, **more)


def ways(ranks: int) -> dict[str, Any]:
    """By name; the first one is what the others are compared with."""
    return {"synchronous": ranks, "majority": "majority", "half": ranks // 2, "solo": "solo"}


def _compared(task: Task, seeds: int) -> Iterator[dict[str, Any]]:
    first: dict[str, Any] = {}
    bound = statistics.median(ideal(task, seed) for seed in range(seeds))
    for how, quorum in ways(task.ranks).items():
        runs = [_trained(task, quorum, seed) for seed in range(seeds)]
        row: dict[str, Any] = dict(zip(COLUMNS, map(statistics.median, zip(*runs, strict=True)), strict=True))
        row |= {f"{name}_samples": [run[place] for run in runs] for place, name in enumerate(COLUMNS[:3])}
        first = first or row
        row |= {"speedup": first["seconds"] / row["seconds"], "whole_speedup": first["whole"] / row["whole"]}
        yield {"task": task.name, "how": how, **row, "ideal": bound}


def _trained(task: Task, quorum: Any, seed: int) -> tuple[float, float, float, int]:
    """(virtual seconds to the target, of the whole, accuracy at the end, rounds), on rank 0."""
    return SimulatedWorld(task.ranks, seed=seed).run(lambda comm: _on_rank(comm, task, quorum, seed))[0]


def _on_rank(comm: Communicator, task: Task, quorum: Any, seed: int) -> tuple[float, float, float, int]:
    torch.manual_seed(seed)
    model, reached, seen = task.model(), float("inf"), 0
    inner = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=0.9)
    optimizer = EagerSGD(inner, model.named_parameters(), comm=comm, quorum=quorum, seed=seed)
    with optimizer:
        for step, seconds in enumerate(task.seconds(seed, comm.rank)):
            comm.elapse(seconds)
            optimizer.zero_grad()
            task.loss(model, seed, comm.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if comm.rank == 0 and reached == float("inf") and optimizer.applied >= seen + task.every:
                seen = optimizer.applied
                reached = comm.clock() if task.accuracy(model) >= task.target else reached
    return reached, comm.clock(), task.accuracy(model), optimizer.applied
