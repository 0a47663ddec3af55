"""The same training with dense and with sparse gradients, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from communicators import Communicator, Link
from rich.console import Console
from thinwire_trainer.agreement import all_or_none
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.plot import plot_runs
from thinwire_trainer.records.folder_lock import locked
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run

from thinwire_cifar.__main__ import APP
from thinwire_cifar.data.digits import TEST_SIZE
from thinwire_cifar.prediction import exchange_seconds, selection_seconds
from thinwire_cifar.report import Prediction, Summary, show, summarise

DENSITY = 0.01
ALGORITHMS: dict[str, list[str]] = {"dense": [], "gtopk": ["--density", str(DENSITY)]}  # and their own flags
GIGABIT = Link(alpha=50e-6, beta=8e-9)
CURVES = {"train_loss": "training loss", "test_accuracy": "test accuracy"}


def compare(comm: Communicator, *, epochs: int, seed: int, output: Path, device: torch.device) -> None:
    """Train with each algorithm, show a table and plot; rank 0 writes to `output`."""
    with all_or_none(comm):
        if comm.rank == 0:
            RunFolder(output).prepare(resume=False)
    with locked(output, comm):
        for algorithm, own in ALGORITHMS.items():
            argv = f"--algorithm {algorithm} --max-epochs {epochs} --seed {seed} --overwrite".split()
            options = parse([*argv, *own, f"--output={output / algorithm}"], APP, world_size=comm.size)
            run(APP, options, comm, device=device)
        numel = json.loads(RunFolder(output / "dense").config.read_text())["parameters"]
        selection = selection_seconds(comm, device, numel=numel, density=DENSITY)
        with all_or_none(comm):
            if comm.rank == 0:
                _show(output, selection=selection, numel=numel, size=comm.size)


def _show(output: Path, *, selection: float, numel: int, size: int) -> None:
    runs = {algorithm: read_metrics(RunFolder(output / algorithm).metrics.path) for algorithm in ALGORITHMS}
    summaries = {algorithm: summarise(rows, images=TEST_SIZE) for algorithm, rows in runs.items()}
    predictions = _predictions(summaries, selection=selection, numel=numel, size=size)
    console = Console()
    show(summaries, predictions, ranks=size, console=console)
    plot_runs(runs, output / "demo.png", curves=CURVES)
    console.print(f"Plot: {output / 'demo.png'}", soft_wrap=True)


def _predictions(summaries: dict[str, Summary], *, selection: float, numel: int, size: int) -> dict[str, Prediction]:
    """Steps at 1 Gbit/s. The compute is the mean of both runs', which do the same work."""
    compute = sum(summary.compute for summary in summaries.values()) / len(summaries)
    return {
        algorithm: Prediction(
            compute=compute,
            selection=0.0 if algorithm == "dense" else selection,
            exchange=exchange_seconds(algorithm, numel=numel, density=DENSITY, size=size, link=GIGABIT),
        )
        for algorithm in summaries
    }
