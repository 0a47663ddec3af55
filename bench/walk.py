"""One gradient's way from DDP's hook to the parameter and back: which of our files and functions it enters.

    python -m bench walk [--list] [--full]

Two gloo ranks on this machine, gTop-k, a model of one bucket, in a step amid training: backward, with all that the
hook and the background do for it, counted on rank 0 by Python's own profiler. calls: how often the functions were
entered in a step; polling by the background is in it, so that it differs from run to run by some.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from data_parallel import SparseHookState, sparse_hook
from sparse_collectives.prediction.plain_table import table
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from bench.form import asked, parser_of
from bench.real_ranks import process_group
from bench.record import record

PACKAGES = ("communicators", "sparse_compress", "sparse_collectives", "replicas", "data_parallel")
COLUMNS = ("package", "files", "functions", "calls")
WARM = 5  # steps; DDP cuts its buckets anew after the first

AGAINST = "an earlier walk: what a change adds to the way"


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the table; returns the exit status."""
    parser = parser_of("walk", __doc__, full="20 steps, not one")
    parser.add_argument("--steps", type=int, help="counted; default 1, with --full 20")
    parser.add_argument("--list", action="store_true", help="every function, with how often it was entered")
    options, facts = asked(parser, argv, steps=(1, 20))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(on_rank, (port, options.steps, options.list, options.output, facts), nprocs=2)  # type: ignore[no-untyped-call]
    return 0


def on_rank(rank: int, port: int, steps: int, every: bool, output: Path, facts: dict[str, Any]) -> None:
    """One rank's part; rank 0 prints. steps: counted ones."""
    with process_group(f"tcp://127.0.0.1:{port}", rank=rank, world_size=2):
        walk = _walked(steps)
        if rank == 0:
            print(walk.as_text(every))
            labels, values = COLUMNS[:1], COLUMNS[3:]
            record(output, "walk", walk.rows(), labels=labels, values=values, facts=facts, against=AGAINST)


def _walked(steps: int) -> Walk:
    walk = Walk()
    threading.setprofile(walk)  # before the background has its thread
    model = nn.Sequential(nn.Linear(100, 90), nn.ReLU(), nn.Linear(90, 10))  # 10⁴ elements
    ddp = DistributedDataParallel(model)
    state = SparseHookState(density=0.01, algorithm="gtopk", named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, sparse_hook)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(8, 100)
    for step in range(WARM + steps):
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        if step == WARM:
            sys.setprofile(walk)
        if step >= WARM:
            walk.begin()
        loss.backward()
        walk.end()
    sys.setprofile(None)
    return walk


class Walk:
    """What `sys.setprofile` calls: counts our functions, on every thread that has it."""

    def __init__(self) -> None:
        self._counts = False
        self._steps: list[Counter[tuple[str, str, str]]] = []

    def begin(self) -> None:
        """A step is counted from here on."""
        self._steps.append(Counter())
        self._counts = True

    def end(self) -> None:
        """Nothing is counted."""
        self._counts = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._counts and event == "call":
            parts = Path(frame.f_code.co_filename).parts
            package = next((part for part in parts if part in PACKAGES), None)
            comprehension = frame.f_code.co_name.startswith("<")
            if package is not None and "src" in parts and not comprehension:
                file = "/".join(parts[parts.index(package, parts.index("src")) :])
                self._steps[-1][package, file, frame.f_code.co_qualname] += 1

    def as_text(self, every: bool) -> str:
        """By package, or by function; calls as a mean of the steps."""
        if every:
            calls = sorted(sum(self._steps, Counter[tuple[str, str, str]]()).items())
            count = len(self._steps)
            return table(("function", "calls"), [[f"{file} {name}", f"{n / count:g}"] for (_, file, name), n in calls])
        return table(COLUMNS, [[str(row[name]) for name in COLUMNS] for row in self.rows()])

    def rows(self) -> list[dict[str, Any]]:
        """By package."""
        return [self._row(package) for package in (*PACKAGES, "together")]

    def _row(self, package: str) -> dict[str, Any]:
        steps = [{key: n for key, n in step.items() if package in (key[0], "together")} for step in self._steps]
        functions = {key for step in steps for key in step}
        calls = [sum(step.values()) for step in steps]
        values = (package, len({file for _, file, _ in functions}), len(functions), statistics.mean(calls))
        return {**dict(zip(COLUMNS, values, strict=True)), "calls_samples": calls}
