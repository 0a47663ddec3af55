"""The settings of one run, after the command line has been checked."""

from dataclasses import asdict, dataclass
from pathlib import Path

Settings = dict[str, str | int | float | None]

# What may differ between a run and its continuation: it shapes no number that training computes.
_NOT_SETTINGS = {"nworkers", "data_dir", "output", "resume", "overwrite", "checkpoint_every", "tensorboard"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run's settings; `trainer.flags.parse` checks every value and explains each."""

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

    def settings(self) -> Settings:
        """What all ranks, and a run and its continuation, must share: numbers and names only."""
        chosen = {name: value for name, value in asdict(self).items() if name not in _NOT_SETTINGS}
        if self.lr_schedule == "constant":
            del chosen["max_epochs"]  # nothing else depends on where the end is
        return chosen
