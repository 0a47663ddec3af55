"""Ranks that are killed, stopped, cut off and started again: what share of their work is kept, and how soon they go on.

    python -m bench elastic [--ranks P] [--minutes M] [--every S] [--timeout S] [--optimizer WAY] [--torchft PYTHON]
                            [--seed S] [--full] [--output DIR]

P processes over gloo, each in a network namespace of its own, each step of which sleeps, train with an `Elastic`; where
no namespaces can be made, over loopback and without cuts. Every S seconds one of them is killed and started again, or
stopped (SIGSTOP), or its link goes dark: for longer than the time-out, so that it is left out, and joins anew.

goodput: steps that count, of those that P ranks would have taken in the time, at their pace when nothing happens: in
the second half of the time between two faults, as far as all are there; by the kind of the last fault. What a block
lost has not counted. back: longest time in which a rank that lives through a fault does not compute, until others come.
joined: from the end of its imports, or the word that it is out, to a rank's first step (torchft: its first commit,
until which it has nobody's state). again: from the end of the fault, or the start of the process, to the first boundary
that keeps steps of that place. Processes that end by themselves are started anew. Parameters must be the same in all
bits on all ranks after every boundary.

--torchft: a Python that has torchft 0.2.0, whose DiLoCo trains beside ours, in the same namespaces, with the same
faults at the same times. Before: `check_elastic_laws` on drawn schedules in the simulated world, and on a fiftieth as
many for every kind of optimizer. --full: 10,000 schedules, 30 minutes, and as many faults a rank and minute as 62 in 30
minutes of 32 ranks. Exit status 1 where parameters of ours differ.
"""

import logging
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.elastic_faults import link_of, teams_of, with_faults
from bench.elastic_ranks import STEP_SECONDS, WAYS
from bench.elastic_trainings import KINDS, ByOptimizer
from bench.record import asked, parser_of, record

LABELS = ("way", "fault", "ranks")
COLUMNS = ("count", "goodput", "back_s", "back_most_s", "joined_s", "joined_most_s", "again_s", "again_most_s")
LIVES_SECONDS = 2.0  # a rank that lives has taken a step since
NO_TORCHFT = (
    "no row of torchft: give --torchft PYTHON, of an environment with `pip install numpy torch==2.13.0 torchft==0.2.0`"
)

Line = dict[str, Any]


def main(argv: Sequence[str] = ()) -> int:
    """Runs both; returns the exit status."""
    parser = parser_of("elastic", __doc__, full="30 minutes, 10,000 schedules")
    parser.add_argument("--ranks", type=int, default=8, help="default 8")
    parser.add_argument("--minutes", type=float, help="default 2, with --full 30")
    parser.add_argument("--every", type=float, help="seconds between faults; default 20, with --full 116")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds, default 1")
    parser.add_argument("--optimizer", choices=WAYS, default="gradients", help="default gradients")
    parser.add_argument("--torchft", metavar="PYTHON", help="a Python that has torchft, to run beside")
    parser.add_argument("--schedules", type=int, help="default 200, with --full 10,000")
    parser.add_argument("--seed", type=int, default=0, help="of faults and schedules, default 0")
    options = asked(parser, argv, minutes=(2.0, 30.0), every=(20.0, 116.0), schedules=(200, 10_000))
    _check_schedules(options.seed, options.schedules)
    rows, same, faults = _trained(options)
    more: dict[str, Any] = {"shown": (*LABELS, *COLUMNS), "same": same, "faults": faults}
    record(options, rows, labels=LABELS, values=("goodput",), against="P ranks without a fault", **more)
    return 0 if same else 1


def _check_schedules(first: int, count: int) -> None:
    from communicators.elastic.testing import Ledger, check_elastic_laws

    logger, began = logging.getLogger("communicators.elastic"), time.monotonic()
    logger.setLevel(logging.ERROR)  # of each death and newcomer, on every rank
    for training in (Ledger(), *map(ByOptimizer, KINDS)):
        drawn = count if isinstance(training, Ledger) else math.ceil(count / 50)
        for seed in range(first, first + drawn):
            check_elastic_laws(seed, training=training)
        print(f"{drawn} schedules of {training}, {time.monotonic() - began:.0f} s", flush=True)


def _trained(options: Any) -> tuple[list[Line], bool, list[Line]]:
    """Rows by team and kind of fault, whether our parameters were the same after every boundary, and the faults."""
    if not options.torchft:
        print(NO_TORCHFT)
    with tempfile.TemporaryDirectory() as folder, link_of(options.ranks) as link:
        print(link.describe(), flush=True)
        with teams_of(link, Path(folder), options) as teams:
            faults = with_faults(teams, link, options)
            end = time.time()
        rows, same = list[Line](), list[bool]()
        for number, team in enumerate(teams):
            own = [{**fault, "pid": fault["pids"][number]} for fault in faults]
            found = [line for line in team.lines() if line["at"] <= end]
            same.append(_are_same(team.way, found))
            for kind in ("all", *sorted({fault["fault"] for fault in faults})):
                rows.append({"way": team.way, "fault": kind, "ranks": options.ranks})
                rows[-1] |= _row(found, own, kind, end, options)
        return rows, same[0], faults


def _row(lines: Sequence[Line], faults: Sequence[Line], kind: str, end: float, options: Any) -> dict[str, Any]:
    ours = [fault for fault in faults if kind in ("all", fault["fault"])]
    pace = options.ranks * _pace(lines, faults, options)
    after = [[line for line in lines if 0 < line["at"] - fault["at"] <= options.every] for fault in ours]
    kept = sum(line["kept"] for window in after for line in window)
    seconds = sum(min(options.every, end - fault["at"]) for fault in ours)
    back = [_back(lines, fault, min(end, fault["at"] + options.every)) for fault in ours]
    joined = [line["joined"] for window in after for line in window if "joined" in line]
    again = [seconds for fault in ours for seconds in _again(lines, fault)]
    found: dict[str, Any] = {"count": len(ours), "goodput": kept / (pace * seconds)}
    for name, taken in {"back": back, "joined": joined, "again": again}.items():
        found |= {f"{name}_s": statistics.median(taken), f"{name}_most_s": max(taken)} if taken else {}
    return found


def _pace(lines: Sequence[Line], faults: Sequence[Line], options: Any) -> float:
    """Steps a second of one rank while nothing happens."""
    begins = [-math.inf, *(fault["at"] + options.every / 2 for fault in faults)]
    ends = [*(fault["at"] for fault in faults), faults[-1]["at"] + options.every]
    kept, seconds = 0, 0.0
    for own in _by_rank(lines).values():
        counted = [line for line in own if line["kept"]]
        for before, line in pairwise(counted):
            whole = before["size"] == line["size"] == options.ranks
            if whole and any(
                begin < before["at"] and line["at"] < end for begin, end in zip(begins, ends, strict=True)
            ):
                kept, seconds = kept + line["kept"], seconds + line["at"] - before["at"]
    return kept / seconds


def _back(lines: Sequence[Line], fault: Line, end: float) -> float:
    """Longest time between two steps of a rank that lives through a fault, less the step, until the group grows."""
    longest: float = 0.0
    for pid, own in _by_rank(lines).items():
        if pid == fault["pid"] or not any(-LIVES_SECONDS < line["at"] - fault["at"] < 0 for line in own):
            continue
        last = {"at": end, "size": 0}  # where it takes no further step
        for before, line in pairwise([*(line for line in own if line["at"] < end), last]):
            if line["at"] > fault["at"]:
                if line["size"] > before["size"]:
                    break
                longest = max(longest, line["at"] - before["at"] - STEP_SECONDS)
    return longest


def _again(lines: Sequence[Line], fault: Line) -> list[float]:
    """Seconds from the end of a fault until steps of its place count again, if they do."""
    kept = [line["at"] for line in lines if line["place"] == fault["place"] and line["kept"]]
    return [at - fault["over"] for at in sorted(kept) if at > fault["over"]][:1]


def _by_rank(lines: Sequence[Line]) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = {}
    for line in sorted(lines, key=lambda line: float(line["at"])):
        found.setdefault(line["pid"], []).append(line)
    return found


def _are_same(way: str, lines: Sequence[Line]) -> bool:
    """Whether every boundary left the same parameters on all of its ranks."""
    digests: dict[int, set[int]] = {}
    for line in lines:
        if "boundary" in line:
            digests.setdefault(line["boundary"], set()).add(line["digest"])
    differing = [boundary for boundary, found in digests.items() if len(found) > 1]
    print(
        f"{way}: {len(digests)} boundaries, {len(differing)} with parameters that differ between ranks, {differing[:5]}"
    )
    return not differing
