"""Figures of a run: metrics.jsonl, and what the user sees meanwhile. Rank 0 only."""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from errno import EPIPE
from pathlib import Path
from types import TracebackType
from typing import Self

from communicators import metrics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.records.durable import naming, opened

Row = dict[str, int | float | str | None]
"""epoch, steps, train_loss, the task's test metrics, seconds and what they went into (`training.phases`),
bytes_sent (by the busiest rank, in training steps), algorithm, world_size."""


def require_metrics(tested: object, *, own: Collection[str]) -> None:
    """RunError unless a task's metrics are numbers by name. own: names of the trainer's."""
    if not isinstance(tested, dict):
        raise RunError(f"metrics() gives a {type(tested).__name__}, expected a dict of numbers by name")
    for name, value in tested.items():
        if not isinstance(value, int | float):
            raise RunError(f"metrics() gives a {type(value).__name__} for {name!r:.40}, expected a number: float(…)")
        if not isinstance(name, str) or name in own:
            raise RunError(f"metrics() gives {name!r:.40}, a name of the trainer's own in metrics.jsonl: take another")


class MetricsFile:
    """The growing metrics of one run; written by rank 0 only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def digest(self) -> tuple[int, str]:
        """Length of the file so far and its SHA-256; a checkpoint keeps them."""
        content = self._content()
        return len(content), hashlib.sha256(content).hexdigest()

    def nbytes(self) -> int:
        """Length of the file so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, row: Row) -> None:
        """Add one epoch; on return it has reached the disk, because a checkpoint that follows counts on it."""
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def check(self, nbytes: int, sha256: str | None) -> None:
        """DamagedError unless the file begins with so many bytes of this checksum (None: of any)."""
        content = self._content()[:nbytes]
        if len(content) < nbytes:
            raise DamagedError(
                f"{self.path} is damaged: {len(content)} bytes, but the checkpoint was made when there were {nbytes}"
            )
        if sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise DamagedError(f"{self.path} is damaged: its checksum is another one than when the checkpoint was made")

    def truncate(self, nbytes: int) -> None:
        """Forget the epochs after the checkpoint that this length belongs to."""
        if self.path.exists():
            os.truncate(self.path, nbytes)

    def _content(self) -> bytes:
        if not os.path.lexists(self.path):
            return b""
        with opened(self.path) as file:
            return file.read()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics file, first epoch first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def figure(row: Row, name: str) -> float:
    """A number in a row; DamagedError where it is not there."""
    value = row.get(name)
    if not isinstance(value, int | float):
        raise DamagedError(f"a row of metrics.jsonl has {value!r:.40} for {name!r}, expected a number: it is damaged")
    return value


class _Plain(Console):
    """Where nobody reads any more, rich would end the process without a word."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(EPIPE, "nobody reads it any more")


class TrainingProgress:
    """A context manager; `quiet` silences it on the other ranks."""

    def __init__(self, title: str, *, epochs: int, steps_per_epoch: int, quiet: bool) -> None:
        self._epochs = epochs
        self._console = _Plain(quiet=quiet, markup=False, emoji=False)  # a folder may be called [a] or :b:
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

    def speaks(self, speaks: bool) -> None:
        """Whether notes are shown: rank 0 may be another one by now."""
        self._console.quiet = not speaks

    def say(self, text: str) -> None:
        """One line of this rank's own, whichever it is."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        """One line of its own. Raises OSError where it cannot be written, such as to a full disk."""
        encoding = self._console.encoding
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        with naming(Path("standard output")):
            self._console.print(shown, highlight=False, soft_wrap=True)

    def step(self, steps: int, loss: float) -> None:
        """Show the number of steps taken, and the last one's training loss."""
        self._bar.update(self._steps, completed=steps, loss=loss)

    def epoch(self, row: Row) -> None:
        """The line of a finished epoch."""
        shown = {name: value for name, value in row.items() if _shown(name, value)}
        figures = "  ".join(f"{name} {'null' if value is None else f'{value:.4g}'}" for name, value in shown.items())
        self.note(f"{self._title}  epoch {row['epoch']:>3}/{self._epochs}  {figures}")


def _shown(name: str, value: float | str | None) -> bool:
    """Losses, the task's own metrics and the time, also where they are not finite; not what is the same every epoch."""
    return isinstance(value, float | None) and not name.endswith("_seconds")


class Events:
    """The metrics of every epoch as scalars, by step. Needs the tensorboard package."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with naming(folder):
            # What a killed run wrote after the checkpoint that is resumed is purged; the epoch that ended there stays.
            self._writer = SummaryWriter(folder, purge_step=first_step + 1)

    def write(self, row: Row, stats: Mapping[str, float]) -> None:
        """Add one epoch, and what training has cost rank 0 by then. Raises OSError where the disk is full."""
        steps = int(figure(row, "steps"))
        with naming(self._folder):
            for name, value in row.items():
                if isinstance(value, int | float) and name not in ("epoch", "steps"):
                    self._writer.add_scalar(name, value, steps)
            metrics.add_scalars(self._writer, stats, steps)
            self._writer.flush()
