"""One rank's copy of the training state: all that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from thinwire_trainer.app import Carries
from thinwire_trainer.launching.device import uses_gpu
from thinwire_trainer.resuming.carried import require_loadable
from thinwire_trainer.synchronisers.synchroniser import Synchroniser
from thinwire_trainer.training.aside import Meter


@dataclass
class Position:
    """Where training is: `step` steps into `epoch` (both from 0).

    since_epoch, since_step: epochs and steps that were behind it when there came to be so many ranks as now.
    """

    epoch: int = 0
    step: int = 0
    since_epoch: int = 0
    since_step: int = 0

    def taken(self, steps_per_epoch: int) -> int:
        """Steps since the beginning of the run, by whatever number of ranks."""
        return self.since_step + (self.epoch - self.since_epoch) * steps_per_epoch + self.step

    def scheduled(self, steps_per_epoch: int) -> int:
        """Steps, had there always been so many ranks as now: the rate goes by epochs, whatever their length was."""
        return self.epoch * steps_per_epoch + self.step


@dataclass
class Totals:
    """What has been added up in the current epoch, on this rank."""

    loss: float = 0.0  # sum over samples, or what else batches are weighed by
    samples: int = 0
    seconds: float = 0.0  # training steps and evaluation
    evaluation_seconds: float = 0.0
    compute_seconds: float = 0.0  # data, forward, backward, update
    communication_seconds: float = 0.0  # selection, exchange
    data_seconds: float = 0.0  # this and the following: the phases of steps, see `thinwire_trainer.training.phases`
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    selection_seconds: float = 0.0
    exchange_seconds: float = 0.0
    update_seconds: float = 0.0
    bytes_sent: int = 0  # for training, in the background too

    def add(self, phases: Mapping[str, float]) -> None:
        """Seconds of a step, or of its end, by phase."""
        for name, seconds in phases.items():
            setattr(self, f"{name}_seconds", getattr(self, f"{name}_seconds") + seconds)
        communication = sum(phases.get(name, 0.0) for name in ("selection", "exchange"))
        self.communication_seconds += communication
        self.compute_seconds += sum(phases.values()) - communication

    @property
    def rest_seconds(self) -> float:
        """Of training steps and evaluation, what is in no phase: the loop's own work."""
        phases = self.compute_seconds + self.communication_seconds
        return self.seconds - phases - self.evaluation_seconds


@dataclass
class Replica:
    """Model, synchroniser (with the optimizer, its rate, residuals, momenta), what the task carries from batch to
    batch, random numbers, position."""

    model: nn.Module
    synchroniser: Synchroniser
    generator: torch.Generator  # of this rank's augmentation
    meter: Meter
    carries: Carries | None = None
    template: dict[str, Any] = field(
        default_factory=dict
    )  # of what it carries: see `thinwire_trainer.resuming.carried`
    position: Position = field(default_factory=Position)
    totals: Totals = field(default_factory=Totals)

    def count_bytes(self) -> None:
        """Adds what was sent since this was called last."""
        self.totals.bytes_sent += self.meter.read()

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on; this rank's own buffers, not their mean."""
        synchronised = self.synchroniser.state_dict()  # first: it may wait for what is under way
        self.count_bytes()
        return {
            "model": self.model.state_dict(),
            **synchronised,
            **({"task": self.carries.state_dict()} if self.carries else {}),
            "generator": self.generator.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if uses_gpu() else None,
            "position": asdict(self.position),
            "totals": asdict(self.totals),
        }

    def require_loadable(self, state: dict[str, Any]) -> None:
        """RunError where what the task has returned for this state could not be loaded again."""
        if self.carries:
            require_loadable(state["task"], self.template)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken; what does not fit may be half loaded (see `resuming.fitting`)."""
        self.model.load_state_dict(state["model"])
        self.synchroniser.load_state_dict({name: state[name] for name in self.synchroniser.state_dict()})
        if self.carries:
            self.carries.load_state_dict(state["task"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] is not None and uses_gpu():  # else a GPU draws on from where this run's seed put it
            torch.cuda.set_rng_state(state["cuda_rng"])
        self.position = Position(**state["position"])
        self.totals = Totals(**state["totals"])
        self.meter.begin()
