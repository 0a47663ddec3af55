"""What the demo found: a table, and what it means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from trainer.metrics import Row


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run. Seconds are per step."""

    accuracy: float  # after the last epoch, 0 … 1
    nbytes: float  # sent per step by the busiest rank
    compute: float
    communication: float  # compression, exchange, waiting

    @property
    def step(self) -> float:
        """Seconds of a whole step, as measured."""
        return self.compute + self.communication


def summarise(rows: Sequence[Row]) -> Summary:
    """The figures of a run out of its metrics."""
    steps = _number(rows[-1]["steps"])

    def per_step(name: str) -> float:
        return sum(_number(row[name]) for row in rows) / steps

    return Summary(
        accuracy=_number(rows[-1]["test_accuracy"]),
        nbytes=per_step("bytes_sent"),
        compute=per_step("compute_seconds"),
        communication=per_step("communication_seconds"),
    )


def show(summaries: Mapping[str, Summary], predicted: Mapping[str, float], *, ranks: int, console: Console) -> None:
    """Print the table and its reading. predicted: seconds of a whole step at 1 Gbit/s, by run."""
    table = Table(title=f"ResNet-20 on handwritten digits, {ranks} ranks")
    for heading in ("", "accuracy", "bytes/step", "step", "of it exchange", "at 1 Gbit/s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_row("", "test", "each rank", "measured", "measured", "predicted", style="dim", end_section=True)
    for name, summary in summaries.items():
        table.add_row(
            name,
            f"{summary.accuracy:.1%}",
            f"{summary.nbytes:,.0f}",
            f"{1e3 * summary.step:.1f} ms",
            f"{1e3 * summary.communication:.1f} ms",
            f"{1e3 * predicted[name]:.1f} ms",
        )
    console.print(Group(table, _reading(summaries, predicted)))


def _reading(summaries: Mapping[str, Summary], predicted: Mapping[str, float]) -> str:
    (_, dense), (name, sparse) = summaries.items()
    fast, slow = predicted.values()
    slower = sparse.communication / dense.communication
    return (
        f"Here, over shared memory, bytes cost next to nothing and selecting them does not: the sparse exchange takes "
        f"{slower:.1f} times as long as the dense one.\n"
        f"{name} sends {dense.nbytes / sparse.nbytes:.0f} times fewer bytes. At 1 Gbit/s the exchange of whole "
        f"gradients would dominate what differs: a step {fast / slow:.2f} times as fast with {name} (predicted: "
        f"compute and selection as measured here, each message 50 µs + 8 ns a byte).\n"
        f"Dense bytes are those of a ring, 2n(P − 1)/P elements: MPI does not tell what it sends."
    )


def _number(value: float | str | None) -> float:
    assert isinstance(value, int | float)
    return value
