"""Runs that die at a given moment, and what two runs came to: for law 7."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.launching.device import own_device
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run
from thinwire_trainer.training import phases

PHASES = {f"{name}_seconds" for name in (*phases.PHASES, "evaluation", "rest")}
SECONDS = {"seconds", "compute_seconds", "communication_seconds"} | PHASES
MEASURED = SECONDS | {"hidden_fraction", "last_rank", "last_share", "late_seconds"}


class Killed(BaseException):
    """Stands for kill −9 of the whole job."""


def train(app: App, options: Options, ranks: int) -> None:
    """Each rank with one thread of torch's, as the command gives it, without which bits are not promised."""
    SimulatedWorld(ranks).run(lambda comm: run(app, options, comm, device=own_device(comm.rank, "cpu")))


def killed_after(operations: int, app: App, options: Options, ranks: int) -> bool:
    """Train, but die at this operation on the disk, in mid-write; whether the run lived so long."""
    left = operations
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            if left == -1 and path.is_file():  # torn, but for what had reached the disk before
                size = path.stat().st_size
                os.truncate(path, size - 5 if path.name == "metrics.jsonl" else size // 2)
            raise Killed
        real(descriptor)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", fsync)
        with contextlib.suppress(Killed, CollectiveError):  # the other ranks notice, in their last moment
            train(app, options, ranks)
    return left < 0


def result(options: Options) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Metrics but for the times, the model, and all that the ranks hold at the end."""
    folder = RunFolder(options.output)
    rows = [{k: v for k, v in row.items() if k not in MEASURED} for row in read_metrics(folder.metrics.path)]
    last = folder.checkpoints.complete()[-1]
    states = [torch.load(file, weights_only=True) for file in sorted(last.glob("rank*.pt"))]
    for state in states:
        state["totals"] = {k: v for k, v in state["totals"].items() if k not in MEASURED}
    return rows, torch.load(folder.model, weights_only=True), states


def assert_same_bits(found: Any, expected: Any, place: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        assert found.numpy().tobytes() == expected.numpy().tobytes(), place
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_same_bits(found[key], value, f"{place}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            assert_same_bits(found[number], value, f"{place}/{number}")
    else:
        assert found == expected, place
