"""The settings of one run, after the command line has been checked."""

from dataclasses import asdict, dataclass
from pathlib import Path

Settings = dict[str, str | int | float | None]

# What may differ between a run and its continuation: it shapes no number that training computes.
_NOT_SETTINGS = {
    "nworkers",
    "oversubscribe",
    "data_dir",
    "output",
    "resume",
    "overwrite",
    "checkpoint_every",
    "tensorboard",
    "verify",
}
_PER_RANK = {"nworkers", "oversubscribe", "data_dir", "output", "tensorboard"}  # may differ between ranks

# What a run did before there was a setting for it. Every setting that is added gets its line here, so that runs from
# before can be resumed: their manifests do not name it.
BEFORE: Settings = {"teams": 1, "wire": "fp32", "clip_norm": None, "nonfinite": "raise"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run's settings; `trainer.command_line.flags.parse` checks every value and explains each."""

    dnn: str
    dataset: str
    algorithm: str
    density: float
    teams: int  # of ranks, for spardl
    wire: str  # how values travel
    batch_size: int  # samples per rank and step
    lr: float
    momentum: float
    weight_decay: float
    clip_norm: float | None
    nonfinite: str  # gradients: "raise" or "skip"
    max_epochs: int
    warmup_epochs: float
    lr_schedule: str
    seed: int
    nworkers: int
    data_dir: Path
    output: Path
    resume: str | None  # "latest" or "previous"
    overwrite: bool
    checkpoint_every: int | None  # steps; 0: never; None: every epoch
    tensorboard: bool
    oversubscribe: bool  # more workers than the cores of this machine can bear
    verify: int  # steps between comparisons of the ranks' parameters; 0: never

    def alike(self) -> Settings:
        """What all ranks must share."""
        return {name: value for name, value in asdict(self).items() if name not in _PER_RANK}

    def settings(self) -> Settings:
        """What a run and its continuation must share: numbers and names only."""
        chosen = {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}
        if self.lr_schedule == "constant":
            del chosen["max_epochs"]  # nothing else depends on where the end is
        return chosen


def with_defaults(then: Settings, now: Settings) -> Settings:
    """The settings of an older run, completed by what it did where there was no setting yet."""
    return {name: value for name, value in BEFORE.items() if name in now} | then
