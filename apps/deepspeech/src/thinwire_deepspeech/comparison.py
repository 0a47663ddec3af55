"""The same training on synthetic spoken digits with dense and with sparse gradients, side by side, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from communicators import Communicator
from rich.console import Console
from rich.table import Table
from thinwire_trainer.comparison import compared
from thinwire_trainer.records.metrics import Row, figure

from thinwire_deepspeech.__main__ import APP


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run after its last epoch. Error rates: 0 … 1."""

    wer: float  # at speeds and pitches that were not trained on
    wer_voices: float  # by voices that were not
    seconds: float  # of all epochs, with their evaluations
    nbytes: float  # that the busiest rank sent in a step


def outcome(rows: Sequence[Row]) -> Outcome:
    """Result of a run, from its metrics."""
    last = rows[-1]
    return Outcome(
        wer=figure(last, "wer"),
        wer_voices=figure(last, "wer_voices"),
        seconds=sum(figure(row, "seconds") for row in rows),
        nbytes=sum(figure(row, "bytes_sent") for row in rows) / figure(last, "steps"),
    )


def show(outcomes: Mapping[str, Sequence[Outcome]], *, ranks: int, console: Console) -> None:
    """Print the table: a line an algorithm, means over its runs, which differ by their seeds."""
    table = Table(title=f"Spoken digits (synthetic speech), {ranks} ranks: word error rates")
    for heading in ("", "speeds, pitches", "voices", "bytes/step", "training"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_row("", "held out, %", "held out, %", "each rank", "and tests", style="dim", end_section=True)
    for name, runs in outcomes.items():
        table.add_row(
            name,
            _rates([run.wer for run in runs]),
            _rates([run.wer_voices for run in runs]),
            f"{mean(run.nbytes for run in runs):,.0f}",
            f"{mean(run.seconds for run in runs):.0f} s",
        )
    console.print(table)


def _rates(rates: Sequence[float]) -> str:
    """The mean in %, and the least and the greatest where there are several."""
    span = f" ({100 * min(rates):.1f} … {100 * max(rates):.1f})" if len(rates) > 1 else ""
    return f"{100 * mean(rates):.1f}{span}"


ALGORITHMS = {"dense": ["--algorithm=dense"], "gtopk": ["--algorithm=gtopk", "--density=0.01"]}


def compare(comm: Communicator, *, epochs: int, seeds: int, data_dir: Path, output: Path, device: torch.device) -> None:
    """Train with each algorithm and each seed from 0 on, and show a table; rank 0 writes to `output`."""
    common = ["--dataset=spoken-digits", f"--data-dir={data_dir}", f"--max-epochs={epochs}"]
    names = {algorithm: [f"{algorithm}-{seed}" for seed in range(seeds)] for algorithm in ALGORITHMS}
    flags = {
        name: [*ALGORITHMS[algorithm], *common, f"--seed={seed}"]
        for algorithm, each in names.items()
        for seed, name in enumerate(each)
    }
    runs = compared(APP, flags, output, comm, device=device)
    if comm.rank == 0:
        outcomes = {algorithm: [outcome(runs[name]) for name in each] for algorithm, each in names.items()}
        show(outcomes, ranks=comm.size, console=Console())
        example = output / names[list(ALGORITHMS)[-1]][0]
        print(f"What it hears in a file of yours: python -m thinwire_deepspeech transcribe {example} FILE.wav")
