"""What the user sees while training runs: a bar in a terminal, a line an epoch everywhere, TensorBoard. Rank 0 only."""

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire_trainer.records.durable import naming
from thinwire_trainer.records.metrics import Row


class TrainingProgress:
    """A context manager; `quiet` silences it on the other ranks."""

    def __init__(self, title: str, *, epochs: int, steps_per_epoch: int, quiet: bool) -> None:
        self._epochs = epochs
        self._console = Console(quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._steps = self._bar.add_task(title, total=epochs * steps_per_epoch, loss=float("nan"))
        self._title = title

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """One line of its own. Raises OSError where it cannot be written, such as to a full disk."""
        with naming(Path("standard output")):
            self._console.print(text, highlight=False, soft_wrap=True)

    def step(self, steps: int, loss: float) -> None:
        """So many steps of the total, the last with this training loss."""
        self._bar.update(self._steps, completed=steps, loss=loss)

    def epoch(self, row: Row) -> None:
        """The line of a finished epoch."""
        figures = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if _shown(name, value))
        self.note(f"{self._title}  epoch {row['epoch']:>3}/{self._epochs}  {figures}")


def _shown(name: str, value: float | str | None) -> bool:
    """Losses, the task's own metrics and the time; not what is the same every epoch."""
    return isinstance(value, float) and not name.endswith("_seconds")


class Events:
    """The metrics of every epoch as scalars, by step. Needs the tensorboard package."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run wrote after the checkpoint that is resumed is purged.
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def write(self, row: Row) -> None:
        """Add one epoch."""
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("epoch", "steps"):
                self._writer.add_scalar(name, value, row["steps"])
        self._writer.flush()
