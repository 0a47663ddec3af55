"""Seconds until a model is as good as plain DDP in bf16 makes it: which way gets there first behind a slow link?

    hatch run peers:bench time-to-quality [--tasks NAME ...] [--ranks P ...] [--links NAME ...] [--seeds N] [--whole]
                                    [--full] [--output DIR]

Quality by step: trainings of `python -m bench convergence`, taken from its record, or made if it lacks them. Seconds by
step: real gloo ranks behind an emulated link, one after another where cores are few; all ways take turns. goal: the
mean final score of DDP with bf16 gradients, less a point of accuracy, or 1 % more loss; where a curve crosses it is
interpolated. seconds: from the first step to the goal, median of the seeds; a training that does not get there takes
for ever, and `reached` says how many do. over_bf16, over_powersgd, over_torch: how many times as long DDP with bf16
gradients takes, torch's PowerSGD of the best rank, and the best of torch's ways. advised: whether `thinwire.advise`
says so on the same ranks, which measure the link and themselves. With --whole some trainings are done behind the link
from beginning to end, to compare.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

from bench.convergence import journal
from bench.convergence.quality import LOSS, POINTS, goal_of, steps_until
from bench.convergence.tasks import TASKS
from bench.convergence.ways import TORCHFT, WAYS, Run
from bench.record import asked, parser_of, record
from bench.time_to_quality import picture
from bench.time_to_quality.seconds import ALONE, DDP, Case, Cell, measured, on_record, phases, until, whole

LINKS = {"1 Gbit/s, 0.1 ms": (1000.0, 0.1), "100 Mbit/s, 1 ms": (100.0, 1.0), "10 Mbit/s, 50 ms": (10.0, 50.0)}
BF16, POWERSGD = "torch bf16 hook", "torch PowerSGD hook"
OPTIMIZERS = {"resnet20-clothing": "sgd"}
"""Of tasks that are not trained with AdamW."""
AVERAGING = tuple(way for way in ("torch PostLocalSGD", TORCHFT) if way in WAYS)
TORCH = (DDP, BF16, POWERSGD, *(f"{POWERSGD} rank {rank}" for rank in (1, 4, 8)), *AVERAGING)
SPARSE = tuple((way, 0.01) for way in ("gtopk", "gtopk int8-packed", "topk-allgather", "spardl", "spardl teams=2"))
PACKED = ("topk-allgather int8-packed", "spardl int8-packed", "spardl teams=2 int8-packed")
ON_TEXT = tuple((way, 0.01) for way in PACKED)
WITH_ADAMW = tuple((way, 1.0) for way in ("dense", "dense bf16"))
"""Not with SGD, because ResNet-20's trainings take half an hour each."""
SYNCHRONOUS = tuple((way, 1.0) for way in ("powersgd rank 4", "dense-int8"))
PERIODIC = (
    *((way, 1.0) for way in ("local-sgd", "local-sgd int8", "overlap-local-sgd", "diloco", "diloco int2")),
    ("sparseloco", 0.021),
)
QUICK = ("vit-digits",)
"""Tasks whose trainings take seconds; those of the others take minutes."""
FULL = ("gpt-text", *QUICK, "resnet20-clothing", "lstm-text")
COLUMNS = ("task", "link", "P", "way", "step_ms", "reached", "seconds", "over_bf16", "over_powersgd", "advised")
AGAINST = "DistributedDataParallel with torch's bf16 and PowerSGD hooks, PostLocalSGDOptimizer, and torchft's DiLoCo"


def main(argv: Sequence[str] = ()) -> None:
    """Trains and measures what is missing, prints the table."""
    parser = parser_of("time-to-quality", __doc__, full="four tasks, all links, 4, 2 and 8 ranks, 5 seeds: hours")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="NAME")
    parser.add_argument("--links", nargs="+", choices=LINKS, metavar="NAME", help=", ".join(map(repr, LINKS)))
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        metavar="P",
        help="default 2; full 4, 2 and 8; long tasks take the first and those on record",
    )
    parser.add_argument("--seeds", type=int, help="default 1; full 5; of long tasks those on record, or one")
    parser.add_argument("--whole", action="store_true", help="compare with trainings from beginning to end; full: do")
    options = asked(
        parser,
        argv,
        tasks=(QUICK, list(FULL)),
        links=(["100 Mbit/s, 1 ms"], list(LINKS)),
        ranks=([2], [4, 2, 8]),
        seeds=(1, 5),
    )
    if TORCHFT not in WAYS:
        print("left out, because not installed: torchft (hatch run peers:bench time-to-quality has it)")
    rows = [row for cell, link in _cells(options) for row in _rows(cell, link, options)]
    again = [found for cell, link in _cells(options) if (found := _again(cell, link, options))]
    checked = list(_whole(options)) if options.whole or options.full else []
    against, labels = AGAINST, COLUMNS[:4]
    more: dict[str, Any] = {"whole": checked, "again": again, "goals": {"loss": LOSS, "points": POINTS}}
    record(options, rows, labels=labels, values=("seconds",), against=against, shown=COLUMNS, draw=picture.draw, **more)


def _cells(options: argparse.Namespace) -> Iterator[tuple[Cell, str]]:
    for task, ranks, link in product(options.tasks, options.ranks, options.links):
        cell = Cell(task, OPTIMIZERS.get(task, "adamw"), ranks, *LINKS[link])
        if task in QUICK or ranks == options.ranks[0] or on_record(cell, options.output):
            yield cell, link


def runs_of(cell: Cell, seeds: int) -> dict[Case, list[Run]]:
    """Trainings that are compared, by what they send at last."""
    ways, task = [*((way, 1.0) for way in TORCH), *SYNCHRONOUS, *SPARSE, *PERIODIC], TASKS[cell.task]
    ways = [*ways, *(ON_TEXT if task.text else ()), *(WITH_ADAMW if cell.optimizer == "adamw" else ())]
    steps, found = task.steps, dict[Case, list[Run]]()
    for way, density in ways:
        if cell.optimizer in WAYS[way].optimizers and (cell.ranks % 4 == 0 or "teams" not in way):
            run = (cell.task, cell.optimizer, way, density, 0.0, cell.ranks)
            found[Case(way, density)] = [Run(*run, seed, steps) for seed in range(seeds)]
    return found


def _runs(cell: Cell, options: argparse.Namespace) -> dict[Case, list[Run]]:
    """So many seeds as are asked for; of a task whose trainings take minutes, those that all ways have on record."""
    runs = runs_of(cell, options.seeds)
    if cell.task in QUICK:
        return runs
    known = journal.on_record(options.output)
    seeds = [
        all(journal.is_whole(known.get(journal.key(run))) for run in of) for of in zip(*runs.values(), strict=True)
    ]
    return {case: [run for run, there in zip(of, seeds, strict=True) if there] or of[:1] for case, of in runs.items()}


def _trained(cell: Cell, options: argparse.Namespace) -> tuple[dict[Case, list[Run]], dict[Case, list[Any]], float]:
    """Runs, how each went, and the goal."""
    runs = _runs(cell, options)
    scores = {case: journal.ended(of, options.output) for case, of in runs.items()}
    return runs, scores, goal_of(cell.task, [one["score"] for one in scores[Case(BF16)]])


def _rows(cell: Cell, link: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One a way."""
    runs, scores, goal = _trained(cell, options)
    cases = list(dict.fromkeys(case for of in runs.values() for case in phases(of[0])))
    seconds, advised = measured(cell, cases, options.output)
    alone = statistics.median(seconds[f"{ALONE} at 1"])
    rows, medians = list[dict[str, Any]](), dict[Case, float]()
    for case, of in runs.items():
        times = [_seconds(run, one, goal, seconds) for run, one in zip(of, scores[case], strict=True)]
        medians[case] = statistics.median(times)
        there = [time for time in times if time < math.inf]
        row = {"task": cell.task, "link": link, "P": cell.ranks, "way": case.way, "density": case.density}
        row |= {"library": "torch" if WAYS[case.way].by == "torch" else "thinwire", "optimizer": cell.optimizer}
        row |= {"step_ms": 1e3 * statistics.median(seconds[case.name]), "alone_ms": 1e3 * alone}
        row |= {"reached": f"{len(there)}/{len(times)}"}
        row |= {"seconds": _finite(medians[case]), "least": min(there, default=None)}
        row |= {"most": _finite(max(times)), "goal": goal, "advised": case == advised}
        row |= {"advice": advised and advised.way}
        rows.append(row | {"score": statistics.mean(one["score"] for one in scores[case])})
    best = {
        "over_bf16": medians[Case(BF16)],
        "over_powersgd": min(time for case, time in medians.items() if case.way.startswith(POWERSGD)),
        "over_torch": min(time for case, time in medians.items() if WAYS[case.way].by == "torch"),
    }
    return [row | {name: _over(time, row["seconds"]) for name, time in best.items()} for row in rows]


def _seconds(run: Run, found: dict[str, Any], goal: float, seconds: Any, **how: Any) -> float:
    steps = steps_until(found["curve"], goal, text=TASKS[run.task].text)
    return until(run, seconds, **how)[math.ceil(steps)] if steps < math.inf else math.inf


def _again(cell: Cell, link: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Whether ways had the same order when the cell was measured before; None where it was not.

    pairs: of ways of which one gets to the goal earlier than the other, in all seeds and turns of the last measurement.
    same: how many of them did so in the one before, by medians.
    """
    runs, scores, goal = _trained(cell, options)
    last, before, *_ = [*(found.seconds for found in on_record(cell, options.output)), None, None]
    if last is None or before is None:
        return None

    def times(case: Case, seconds: Any, turn: Any) -> list[float]:
        pairs = zip(runs[case], scores[case], strict=True)
        return [_seconds(run, one, goal, seconds, turn=turn) for run, one in pairs]

    known = [case for case, [run, *_] in runs.items() if {of.name for of in phases(run)} <= last.keys() & before.keys()]
    most = {case: max(times(case, last, max)) for case in known}
    there = [case for case in known if most[case] < math.inf]
    least = {case: min(times(case, last, min)) for case in there}
    medians = {case: statistics.median(times(case, before, statistics.median)) for case in there}
    apart = [(one, other) for one, other in permutations(there, 2) if most[one] < least[other]]
    same = sum(medians[one] < medians[other] for one, other in apart)
    return {"task": cell.task, "link": link, "P": cell.ranks, "pairs": len(apart), "same": same}


def _finite(value: float) -> float | None:
    return value if value < math.inf else None


def _over(other: float, own: float | None) -> float | None:
    """How many times as long another takes; None where either does not get there."""
    return None if own is None or other == math.inf else other / own


def _whole(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds of whole trainings behind the link, and what `until` makes of single steps."""
    for cell, link in _cells(options):
        if cell.task in QUICK and cell.ranks == options.ranks[0]:
            runs = runs_of(cell, 1)
            cases = list(dict.fromkeys(case for of in runs.values() for case in phases(of[0])))
            seconds = measured(cell, cases, options.output).seconds
            for case in (Case(BF16), Case("gtopk", 0.01), Case("diloco int2")):
                [run] = runs[case]
                took, said = statistics.median(whole(cell, run)), until(run, seconds)[-1]
                row = {"task": cell.task, "link": link, "P": cell.ranks, "way": case.way}
                yield row | {"measured": took, "by_steps": said, "ratio": said / took}
