"""The same training with dense and with sparse gradients, side by side: runs, predictions, and a table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from communicators import Communicator, Link, SimulatedWorld, allreduce
from rich.console import Console
from rich.table import Table
from sparse_collectives import sparse_allreduce
from sparse_compress import TopK
from thinwire_trainer.agreement import all_or_none
from thinwire_trainer.comparison import compared
from thinwire_trainer.plot import plot_runs
from thinwire_trainer.records.metrics import Row, figure
from thinwire_trainer.records.run_folder import RunFolder

from thinwire_cifar.__main__ import APP
from thinwire_cifar.data.digits import TEST_SIZE


def exchange_seconds(algorithm: str, *, numel: int, density: float, size: int, link: Link) -> float:
    """Predicted seconds of one gradient exchange: every message charged α + β·bytes."""

    def exchange(comm: Communicator, gradient: torch.Tensor) -> None:
        if algorithm == "dense":
            allreduce(gradient, comm, native=False)
        else:
            select = TopK(density)
            sparse_allreduce(select(gradient), comm, k=select.entries(numel), algorithm=algorithm)

    world = SimulatedWorld(size, link=link)
    world.run(lambda comm: exchange(comm, torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))))
    return world.elapsed


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run as measured. Seconds are per step."""

    accuracy: float  # after the last epoch, 0 … 1
    images: int  # it was tested with
    nbytes: float  # sent per step by the busiest rank
    compute: float
    communication: float  # compression, exchange, waiting
    selection: float = 0.0  # of what is sent, a part of it

    @property
    def uncertainty(self) -> float:
        """Binomial standard error of the accuracy, √(p(1 − p)/N); p as with one image more right and one more wrong, so
        that it is not 0 where all are right.
        """
        p = (self.accuracy * self.images + 1) / (self.images + 2)
        return math.sqrt(p * (1 - p) / self.images)

    @property
    def step(self) -> float:
        """A whole step."""
        return self.compute + self.communication


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step on a slower network, in seconds: compute and selection as measured, the exchange as simulated."""

    compute: float
    selection: float
    exchange: float

    @property
    def step(self) -> float:
        """A whole step."""
        return self.compute + self.selection + self.exchange


def summarise(rows: Sequence[Row], *, images: int) -> Summary:
    """The figures of a run out of its metrics, which was tested with so many images."""
    steps = figure(rows[-1], "steps")

    def per_step(name: str) -> float:
        return sum(figure(row, name) for row in rows) / steps

    return Summary(
        accuracy=figure(rows[-1], "test_accuracy"),
        images=images,
        nbytes=per_step("bytes_sent"),
        compute=per_step("compute_seconds"),
        communication=per_step("communication_seconds"),
        selection=per_step("selection_seconds"),
    )


def show(
    summaries: Mapping[str, Summary], predictions: Mapping[str, Prediction], *, ranks: int, console: Console
) -> None:
    """Print the table and its reading; predictions are for 1 Gbit/s."""
    table = Table(title=f"ResNet-20 on handwritten digits, {ranks} ranks")
    for heading in ("", "accuracy", "bytes/step", "step", "of it exchange", "at 1 Gbit/s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_row("", "test", "each rank", "measured", "measured", "predicted", style="dim", end_section=True)
    for name, summary in summaries.items():
        table.add_row(
            name,
            f"{100 * summary.accuracy:.1f} ± {100 * summary.uncertainty:.1f} %",
            f"{summary.nbytes:,.0f}",
            f"{1e3 * summary.step:.1f} ms",
            f"{1e3 * summary.communication:.1f} ms",
            f"{1e3 * predictions[name].step:.1f} ms",
        )
    console.print(table)
    console.print(reading(summaries, predictions), highlight=False)


def reading(summaries: Mapping[str, Summary], predictions: Mapping[str, Prediction]) -> str:
    """Explain the figures of a dense and a sparse run, and what they do not say."""
    (_, dense), (name, sparse) = summaries.items()
    before, after = predictions.values()
    return (
        f"{_difference(name, dense, sparse)}\n"
        f"Here, over shared memory, bytes cost next to nothing and selecting them does not: with selection and "
        f"waiting, the {name} exchange takes {sparse.communication / dense.communication:.1f} times as long as the "
        f"dense one. Leave it off on such a machine.\n"
        f"{name} sends {dense.nbytes / sparse.nbytes:.0f} times fewer bytes. At 1 Gbit/s they would travel in "
        f"{1e3 * after.exchange:.1f} ms instead of {1e3 * before.exchange:.1f} ms, and selecting takes "
        f"{1e3 * after.selection:.1f} ms: steps {before.step / after.step:.2f} times as fast. (Predicted: compute "
        f"and selection as measured here, messages in a simulated network at 50 µs + 8 ns a byte.)\n"
        f"Dense bytes are counted as a ring sends them, 2n(P − 1)/P elements: MPI does not tell."
    )


def _difference(name: str, dense: Summary, sparse: Summary) -> str:
    """Whether accuracies differ by more than the test can tell."""
    points = round(100 * (sparse.accuracy - dense.accuracy), 1)  # as they are shown
    error = round(100 * math.hypot(dense.uncertainty, sparse.uncertainty), 1)
    within = "within" if abs(points) <= error else "more than"
    return (
        f"{name} is {abs(points):.1f} points {'below' if points < 0 else 'above'} dense, {within} ± {error:.1f}, the "
        f"standard error that {dense.images} test images leave; seeds differ as much."
    )


DENSITY = 0.01
ALGORITHMS = {"dense": ["--algorithm=dense"], "gtopk": ["--algorithm=gtopk", f"--density={DENSITY}"]}
GIGABIT = Link(alpha=50e-6, beta=8e-9)
CURVES = {"train_loss": "training loss", "test_accuracy": "test accuracy"}


def compare(comm: Communicator, *, epochs: int, seed: int, output: Path, device: torch.device) -> None:
    """Train with each algorithm, show a table and plot; rank 0 writes to `output`."""
    flags = {name: [*own, f"--max-epochs={epochs}", f"--seed={seed}"] for name, own in ALGORITHMS.items()}
    runs = compared(APP, flags, output, comm, device=device)
    with all_or_none(comm):
        if comm.rank == 0:
            _show(runs, output, size=comm.size)


def _show(runs: Mapping[str, Sequence[Row]], output: Path, *, size: int) -> None:
    summaries = {algorithm: summarise(rows, images=TEST_SIZE) for algorithm, rows in runs.items()}
    numel = RunFolder(output / "dense").recorded()["parameters"]
    console = Console(markup=False, emoji=False)  # a folder may be called [a] or :b:
    show(summaries, predicted(summaries, GIGABIT, numel=numel, size=size), ranks=size, console=console)
    plot_runs(runs, output / "demo.png", curves=CURVES)
    console.print(f"Plot: {output / 'demo.png'}", soft_wrap=True)


def predicted(summaries: Mapping[str, Summary], link: Link, *, numel: int, size: int) -> dict[str, Prediction]:
    """Steps over this link. The compute is the mean of all runs', which do the same work."""
    compute = statistics.mean(summary.compute for summary in summaries.values())
    return {
        algorithm: Prediction(
            compute=compute,
            selection=summary.selection,
            exchange=exchange_seconds(algorithm, numel=numel, density=DENSITY, size=size, link=link),
        )
        for algorithm, summary in summaries.items()
    }
