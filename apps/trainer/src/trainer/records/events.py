"""TensorBoard events, where asked for."""

from pathlib import Path

from trainer.records.metrics import Row


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
