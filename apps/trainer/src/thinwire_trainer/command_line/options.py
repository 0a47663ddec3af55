"""The settings of one run, after the command line has been checked."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Settings = dict[str, str | int | float | list[int] | None]

KEEP = 2
"""Checkpoints, where --keep does not say."""

# What may differ between a run and its continuation: it shapes no number that training computes.
_NOT_SETTINGS = {
    "nworkers",
    "oversubscribe",
    "device",
    "backend",
    "data_dir",
    "download",
    "readers",
    "output",
    "resume",
    "residuals",
    "overwrite",
    "checkpoint_every",
    "keep",
    "tensorboard",
    "profile",
}
_PER_RANK = {
    "nworkers",
    "oversubscribe",
    "data_dir",
    "download",
    "readers",
    "output",
    "tensorboard",
}  # may differ between ranks

# What a run did before there was a setting for it. Every common setting that is added gets its line here, so that runs
# from before can be resumed: their manifests do not name it. An algorithm's own: see `Flag.default`.
BEFORE: Settings = {
    "optimizer": "sgd",
    "clip_norm": None,
    "nesterov": False,
    "label_smoothing": 0.0,
    "milestones": None,
    "amp": False,
    "compile": False,
    "overlap": False,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run's settings; `thinwire_trainer.command_line.flags.parse` checks every value and explains each.

    own: what the algorithm alone takes, every flag of its entry in the table, and nothing else. app: the app's own
    flags. free: which of these may differ between a run and its continuation.
    """

    dnn: str
    dataset: str
    algorithm: str
    overlap: bool  # of the exchange with backward
    batch_size: int  # samples per rank and step
    optimizer: str  # "sgd" or "adamw"
    lr: float
    momentum: float  # of AdamW β₁
    nesterov: bool
    weight_decay: float
    clip_norm: float | None
    label_smoothing: float  # for the task's loss; 0 where the app takes none
    max_epochs: int
    warmup_epochs: float
    lr_schedule: str
    milestones: list[int] | None  # epochs, ascending; None: where the schedule has them
    seed: int
    nworkers: int
    device: str  # "auto", "cpu" or "cuda"
    backend: str  # torchrun's: "gloo" or "nccl"
    amp: bool  # autocast to bfloat16
    compile: bool
    data_dir: Path
    download: bool  # what of the data set is missing
    readers: int  # threads that read ahead
    output: Path
    resume: str | None  # "latest" or "previous"
    residuals: str | None  # "carry" or "drop", where it is resumed with another number of ranks
    overwrite: bool
    checkpoint_every: int | None  # steps; 0: never; None: every epoch
    keep: int  # checkpoints
    tensorboard: bool
    profile: bool
    oversubscribe: bool  # more workers than the cores of this machine can bear
    own: Mapping[str, Any]
    app: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()

    def flags(self) -> dict[str, Any]:
        """All of them by name, the app's and the algorithm's own last."""
        common = asdict(self)
        del common["own"], common["app"], common["free"]
        return common | dict(self.app) | dict(self.own)

    def recorded(self) -> dict[str, Any]:
        """The flags as a run's config.json has them; `command_line.flags.parse` takes all of them back."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self.flags().items()}

    def alike(self) -> Settings:
        """What all ranks must share."""
        return {name: value for name, value in self.flags().items() if name not in _PER_RANK}

    def settings(self) -> Settings:
        """What a run and its continuation must share: numbers and names only."""
        chosen = {name: value for name, value in self.flags().items() if name not in _NOT_SETTINGS | self.free}
        if self.lr_schedule == "constant" or self.milestones:
            del chosen["max_epochs"]  # nothing else depends on where the end is
        return chosen

    def not_reached(self) -> str:
        """What the rate's schedule has only after the end of this run; "" for nothing."""
        if self.milestones and self.milestones[0] >= self.max_epochs:
            late = f"--milestones {self.milestones[0]}: this run ends before it"
        elif self.warmup_epochs >= self.max_epochs:
            late = f"--warmup-epochs {self.warmup_epochs:g}: this run ends before they do"
        else:
            return ""
        longer = "" if "max_epochs" in self.settings() else "; --resume with a greater --max-epochs goes on"
        return f"{late}, after {self.max_epochs}{longer}"


def in_todays_terms(then: Settings, now: Settings, own_flags: Settings) -> Settings:
    """The settings of an older run: with what it did where there was no setting yet, without what had no effect.

    own_flags: of all algorithms, with the defaults of this one's, and None for others'; and the app's. Runs once
    recorded those that other algorithms have, too.
    """
    effective = {name: value for name, value in then.items() if name in now or name not in own_flags}
    return {name: value for name, value in (BEFORE | own_flags).items() if name in now} | effective
