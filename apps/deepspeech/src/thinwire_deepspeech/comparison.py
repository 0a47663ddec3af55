"""The same training on synthetic spoken digits with dense and with sparse gradients, side by side."""

from __future__ import annotations

from pathlib import Path

import torch
from communicators import Communicator
from rich.console import Console
from thinwire_trainer.agreement import all_or_none
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.records.folder_lock import locked
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run

from thinwire_deepspeech.__main__ import APP
from thinwire_deepspeech.report import Outcome, outcome, show

ALGORITHMS = {"dense": "--algorithm dense", "gtopk": "--algorithm gtopk --density 0.01"}


def compare(comm: Communicator, *, epochs: int, seeds: int, data_dir: Path, output: Path, device: torch.device) -> None:
    """Train with each algorithm and each seed from 0 on, and show a table; rank 0 writes to `output`."""
    with all_or_none(comm):
        if comm.rank == 0:
            RunFolder(output).prepare(resume=False)
    with locked(output, comm):
        outcomes: dict[str, list[Outcome]] = {}
        for algorithm, flags in ALGORITHMS.items():
            for seed in range(seeds):
                folder = output / f"{algorithm}-{seed}"
                argv = f"{flags} --dataset spoken-digits --max-epochs {epochs} --seed {seed} --overwrite".split()
                argv += [f"--data-dir={data_dir}", f"--output={folder}"]
                run(APP, parse(argv, APP, world_size=comm.size), comm, device=device)
                with all_or_none(comm):
                    rows = read_metrics(RunFolder(folder).metrics.path) if comm.rank == 0 else []
                if comm.rank == 0:
                    outcomes.setdefault(algorithm, []).append(outcome(rows))
        if comm.rank == 0:
            show(outcomes, ranks=comm.size, console=Console())
            example = output / f"{list(ALGORITHMS)[-1]}-0"
            print(f"What it hears in a file of yours: python -m thinwire_deepspeech transcribe {example} FILE.wav")
