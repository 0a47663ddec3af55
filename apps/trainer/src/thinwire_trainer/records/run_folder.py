"""Folder of a run.

OUTPUT/config.json      its settings, and on what it ran
OUTPUT/task.json        what the app's commands need besides the model (see `thinwire_trainer.app.Keeps`)
OUTPUT/metrics.jsonl    one object an epoch
OUTPUT/checkpoints/     for --resume
OUTPUT/events/          TensorBoard's, where --tensorboard asks for them
OUTPUT/live/            statistics of each process under way, where --metrics file asks for them
OUTPUT/trace.json       where --profile asks for it (see `thinwire_trainer.records.trace`)
OUTPUT/model.pt         the trained model's state_dict, buffers averaged over ranks; a run that goes on deletes it
OUTPUT/lock             while a run writes there (see `thinwire_trainer.records.folder_lock`)
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire_trainer.command_line.options import KEEP
from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.records.checkpoint import Checkpoints
from thinwire_trainer.records.durable import opened, sealed, unsealed, write_aside
from thinwire_trainer.records.metrics import MetricsFile

NONE_TO_RESUME = "no run to resume: check --output, or leave --resume out"
NONE_TO_JOIN = "no run, though others train in it: --output has to be on a shared file system"


class RunFolder:
    """The output folder of one run; `keep` checkpoints. Ranks read it; only rank 0 writes, except for checkpoints."""

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self.path = path
        self.config = path / "config.json"  # written before all but task.json: a folder that has it holds a run
        self.task = path / "task.json"
        self.model = path / "model.pt"  # written when training has ended
        self.trace = path / "trace.json"
        self.events, self.live = path / "events", path / "live"
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self._files = self.metrics.path, self.model, self.trace, self.task, self.config

    def prepare(self, *, resume: bool) -> None:
        """Make the folder; RunError if it holds no run to resume, or is none."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise RunError(f"{self.path} is not a folder: give another one with --output")
        if resume:
            self.require_run()
        self.path.mkdir(parents=True, exist_ok=True)

    def recorded(self, *, wanted: str = NONE_TO_RESUME) -> dict[str, Any]:
        """The run's config.json; RunError where there is no run, or it is damaged. wanted: what it then says."""
        self.require_run(wanted)
        try:
            with opened(self.config) as file:
                config = json.load(file)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise DamagedError(f"{self.config} is damaged: it holds no settings")
        return config

    def require_run(self, wanted: str = NONE_TO_RESUME) -> None:
        """RunError that says that the folder does not hold what was wanted, if it holds no run."""
        if not os.path.lexists(self.config):
            raise RunError(f"{self.path} holds {wanted}")

    def require_kept(self, kept: dict[str, Any] | None) -> None:
        """RunError that names what the run keeps otherwise in task.json, such as other data than it began with.

        What an older version of the task did not keep yet is not compared.
        """
        purpose = "it tells whether these data are those that the run began with: copy it back, or begin another run"
        if not os.path.lexists(self.task):
            if kept is not None:
                raise RunError(f"{self.task} is missing; {purpose} (those of older versions have none)")
            return
        try:
            recorded, now = unsealed(self.task), json.loads(json.dumps(kept))
        except DamagedError as error:  # all checkpoints share it: one before would not help
            raise RunError(f"{error}; {purpose}") from None
        other = [name for name in recorded if name not in now or recorded[name] != now[name]] if now else ["task"]
        if other:
            raise RunError(
                f"{self.task} is not what these data give (other {', '.join(other).replace('_', ' ')}): "
                f"go on with those that the run began with"
            )

    def begin(self, config: dict[str, object], *, kept: dict[str, Any] | None, overwrite: bool) -> None:
        """Begin a new run in the folder, which holds none (see `require_empty`) or one to overwrite.

        kept: for task.json.
        """
        if overwrite:
            self._delete_run()
        try:
            if kept is None:
                self.task.unlink(missing_ok=True)
            else:
                write_aside(self.task, sealed(kept))
            write_aside(self.config, json.dumps(config, indent=1) + "\n")
        except OSError:
            self.task.unlink(missing_ok=True)  # without config.json there is no run, and nothing is to be in the way
            raise

    def holds_run(self) -> bool:
        """Whether the folder holds (parts of) a run: more than task.json, all that one killed at once has."""
        if any(map(os.path.lexists, {self.checkpoints.path, *self._files} - {self.task})):
            return True
        if not os.path.lexists(self.task):
            return False
        try:
            unsealed(self.task)
        except RunError:
            return True  # somebody's
        return False

    def require_empty(self) -> None:
        """RunError if the folder holds (parts of) a run."""
        if self.holds_run():
            raise RunError(
                f"{self.path} already holds a run: give --resume to go on with it, --overwrite to delete it, "
                f"or another folder with --output"
            )

    def _delete_run(self) -> None:
        """Delete what a run writes and nothing else that may lie in the folder."""
        self.checkpoints.delete()
        for file in self._files:
            file.unlink(missing_ok=True)
        for file in self.events.glob("events.out.tfevents.*"):
            file.unlink()
        with suppress(OSError):  # there is none, or it holds something else
            self.events.rmdir()
