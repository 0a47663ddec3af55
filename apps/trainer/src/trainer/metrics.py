"""metrics.jsonl: one JSON object an epoch, kept in step with the checkpoints."""

import json
import os
from pathlib import Path

from trainer.errors import RunError

Row = dict[str, int | float | str | None]
"""epoch, steps, train_loss, the task's test metrics, seconds, compute_seconds, communication_seconds, bytes_sent
(by the busiest rank, in training steps), algorithm, world_size."""


class MetricsFile:
    """The growing metrics of one run; written by rank 0 only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def nbytes(self) -> int:
        """Length of the file so far; a checkpoint keeps it."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, row: Row) -> None:
        """Add one epoch; on return it has reached the disk, because a checkpoint that follows counts on it."""
        with self.path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate(self, nbytes: int) -> None:
        """Forget the epochs after the checkpoint that this length belongs to."""
        if self.nbytes < nbytes:
            raise RunError(
                f"{self.path}: {self.nbytes} bytes, but the checkpoint was made when there were {nbytes}: "
                f"put the file back, or start the run again with --overwrite"
            )
        if self.path.exists():
            os.truncate(self.path, nbytes)


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics file, first epoch first."""
    return [json.loads(line) for line in path.read_text().splitlines()]
