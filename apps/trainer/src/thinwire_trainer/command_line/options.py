"""The settings of one run, after the command line has been checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from thinwire_trainer.command_line.flag import Flag

Settings = dict[str, str | int | float | list[int] | None]

KEEP = 2
"""Checkpoints, where --keep does not say."""
DATA_DIR, READERS = Path("data"), 2
"""Defaults of --data-dir and --readers, for an app's check of flags without effect."""

PER_RANK = {
    "nworkers",
    "elastic",
    "oversubscribe",
    "data_dir",
    "download",
    "readers",
    "output",
    "tensorboard",
    "metrics",
}
"""Flags that may differ between ranks."""
NOT_SETTINGS = PER_RANK | {
    "at_least",
    "device",
    "backend",
    "resume",
    "residuals",
    "overwrite",
    "checkpoint_every",
    "keep",
    "profile",
}
"""Flags that may differ between a run and its continuation: none shapes no number that training computes."""

IN_STEPS = {
    "dense_steps": "each of which sums whole gradients",
    "density_warmup": "none of which has the --density",
    "sync_every": "and averages at its end alone",
}
"""What becomes of a run that ends before so many steps, by algorithms' own flags."""

OWN = ("own", "app", "declared", "momentum_said", "compared")  # fields that are no flags themselves


def endless(settings: Settings) -> bool:
    """Whether no rate of a run depends on where it ends, so that it may go on beyond."""
    return settings.get("lr_schedule") == "constant" or bool(settings.get("milestones"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run's settings; `thinwire_trainer.command_line.flags.parse` checks every value and explains each.

    own: what the algorithm alone takes, every flag of its entry in the table, and nothing else. app: the app's own
    flags. declared: all flags, with defaults. momentum_said: whether the momentum was given, so that no default takes
    its place.
    compared: whether it is one of a comparison's runs, such as a demo's, which the next comparison may delete.
    """

    dnn: str
    dataset: str
    algorithm: str
    overlap: bool  # of the exchange with backward
    batch_size: int  # samples per rank and step; elastic: of all ranks together
    optimizer: str  # "sgd", "adamw" or "muon"
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
    elastic: str | None  # where ranks that come and go meet; "": in the Store of torchrun's agent
    at_least: int | None  # of those
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
    metrics: str | None  # where statistics go meanwhile: "prometheus:PORT", "otlp:URL", "file"
    profile: bool
    oversubscribe: bool  # more workers than the cores of this machine can bear
    own: Mapping[str, Any]
    app: Mapping[str, Any] = field(default_factory=dict)
    declared: Sequence[Flag] = ()
    momentum_said: bool = True
    compared: bool = False

    def flags(self) -> dict[str, Any]:
        """All of them by name, the app's and the algorithm's own last."""
        common = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in OWN}
        return common | dict(self.app) | dict(self.own)

    def recorded(self) -> dict[str, Any]:
        """The flags as a run's config.json has them; `command_line.flags.parse` takes all of them back."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self.flags().items()}

    def alike(self) -> Settings:
        """Flags that all ranks must share."""
        return {name: value for name, value in self.flags().items() if name not in PER_RANK}

    def settings(self) -> Settings:
        """Flags that a run and its continuation must share: numbers and names only."""
        free = {flag.name for flag in self.declared if not flag.shapes} | NOT_SETTINGS
        chosen = {name: value for name, value in self.flags().items() if name not in free}
        chosen["elastic"] = self.elastic is not None  # not where: a batch is of all ranks there
        if endless(chosen):
            del chosen["max_epochs"]  # nothing else depends on where the end is
        return chosen

    def changed(self, then: Settings) -> dict[str, tuple[object, object]]:
        """Compare with the settings of a run: name -> (then, now) where these differ.

        then: a run's settings. A flag that there was not yet had its default; one that there is no more has no effect.
            The length of a run that may go on beyond it is not compared.
        """
        before: dict[str, Any] = {flag.name: flag.default for flag in self.declared} | {"elastic": False}
        now = self.settings()
        was = {name: then.get(name, before.get(name)) for name in now}
        if endless(was):
            was.pop("max_epochs", None)
        return {name: (its, now[name]) for name, its in was.items() if its != now[name]}

    def not_reached(self, steps: int) -> list[str]:
        """Warnings of settings that take effect only after the end of this run, which takes so many steps."""
        late = []
        if self.milestones and self.milestones[0] >= self.max_epochs:
            late.append(f"--milestones {self.milestones[0]}: this run ends before it, after {self.max_epochs}")
        if self.warmup_epochs >= self.max_epochs:
            late.append(
                f"--warmup-epochs {self.warmup_epochs:g}: this run ends before they do, after {self.max_epochs}"
            )
        for name, what in IN_STEPS.items():
            count = str(self.own.get(name, "")).removeprefix("dgc:")
            if count.isdecimal() and int(count) >= steps:
                flag = f"--{name.replace('_', '-')} {self.own[name]}"
                late.append(f"{flag}: this run takes {steps} steps, {what}")
        longer = "" if "max_epochs" in self.settings() else "; --resume with a greater --max-epochs goes on"
        return [f"{text}{longer}" for text in late]
