"""What a run leaves behind.

OUTPUT/config.json      its settings, and on what it ran
OUTPUT/metrics.jsonl    one object an epoch
OUTPUT/checkpoints/     for --resume
OUTPUT/model.pt         the trained model's state_dict, buffers averaged over ranks
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import Checkpoints
from trainer.durable import write_aside
from trainer.errors import RunError
from trainer.metrics import MetricsFile


@dataclass(frozen=True)
class RunFolder:
    """The output folder of one run. Ranks read it; only rank 0 writes, except for checkpoints."""

    path: Path

    @property
    def config(self) -> Path:
        """Written first: a folder that has it holds a run."""
        return self.path / "config.json"

    @property
    def model(self) -> Path:
        """Written when training has ended."""
        return self.path / "model.pt"

    @property
    def metrics(self) -> MetricsFile:
        """The epochs so far."""
        return MetricsFile(self.path / "metrics.jsonl")

    @property
    def checkpoints(self) -> Checkpoints:
        """The newest two."""
        return Checkpoints(self.path / "checkpoints")

    def begin(self, config: dict[str, object], *, overwrite: bool) -> None:
        """Prepare the folder for a new run; RunError if it holds one that is not to be overwritten."""
        if self.config.exists():
            if not overwrite:
                raise RunError(
                    f"{self.path} already holds a run: give --resume to go on with it, --overwrite to delete it, "
                    f"or another folder with --output"
                )
            self._delete_run()
        self.path.mkdir(parents=True, exist_ok=True)
        write_aside(self.config, json.dumps(config, indent=1) + "\n")

    def require_run(self) -> None:
        """RunError if there is nothing to resume."""
        if not self.config.exists():
            raise RunError(f"{self.path} holds no run to resume: check --output, or leave --resume out")

    def _delete_run(self) -> None:
        """Delete what a run writes and nothing else that may lie in the folder."""
        shutil.rmtree(self.checkpoints.path, ignore_errors=True)
        for file in (self.metrics.path, self.model, self.config):
            file.unlink(missing_ok=True)
