"""One rank's copy of the training state: all that a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from thinwire_trainer.agreement import Meter
from thinwire_trainer.app import Carries
from thinwire_trainer.errors import RunError
from thinwire_trainer.launching.device import uses_gpu
from thinwire_trainer.synchronisers.synchroniser import Synchroniser

PLAIN = (Tensor, int, float, str, bool, type(None))


@dataclass
class Position:
    """Place of training in the run: `step` steps into `epoch` (both from 0).

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
    """Sums of the current epoch on this rank."""

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
        """Seconds of training and evaluation in no phase: the loop's own work."""
        phases = self.compute_seconds + self.communication_seconds
        return self.seconds - phases - self.evaluation_seconds


T = TypeVar("T", Position, Totals)


def counted(kind: type[T], state: Mapping[str, Any]) -> T:
    """Position or totals out of a checkpoint; ValueError for what is not counted so."""
    made = kind(**state)
    for name, value in asdict(made).items():
        whole = type(getattr(kind(), name)) is int
        if type(value) not in ((int,) if whole else (int, float)) or (whole and value < 0):
            raise ValueError(f"{name} is {value!r:.40}, expected a {'whole ' * whole}number")
    return made


class ModelGenerator:
    """Torch's global generators, of the CPU and of a GPU, as one rank has them: for what takes no other, as dropout.

        with generator:
            task.loss(batch, …).backward()

    Seeded when it is made. Ranks of a simulated world share torch's generators, which are this rank's inside the block;
    no rank waits there. A rank with a process to itself has them all the time: what draws outside of blocks, such as an
    optimizer of one's own, draws from the same numbers, and a step costs nothing but a copy.
    """

    _last: ClassVar["ModelGenerator | None"] = None
    """Rank of this process that had torch's generators last."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        ModelGenerator._last = self
        self._keep()

    def __enter__(self) -> None:
        if ModelGenerator._last is not self:
            self._put_back()

    def __exit__(self, *_: object) -> None:
        self._keep()

    def state_dict(self) -> dict[str, Any]:
        """State of both generators; None for that of a GPU that there is not."""
        if ModelGenerator._last is self:
            self._keep()
        return {"torch_rng": self._cpu, "cuda_rng": self._cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        self._cpu, self._cuda = state["torch_rng"], state["cuda_rng"]
        self._put_back()

    def _keep(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if uses_gpu() else None

    def _put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None and uses_gpu():  # else a GPU draws on from where this run's seed put it
            torch.cuda.set_rng_state(self._cuda)
        ModelGenerator._last = self


@dataclass
class Replica:
    """Model, synchroniser (with the optimizer, its rate, residuals, momenta), what the task carries from batch to
    batch, random numbers, position."""

    model: nn.Module
    synchroniser: Synchroniser
    generator: torch.Generator  # of this rank's augmentation
    model_generator: ModelGenerator
    meter: Meter
    carries: Carries | None = None
    template: dict[str, str] = field(default_factory=dict)  # of what it carries: see `schema`
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
            **self.model_generator.state_dict(),
            "position": asdict(self.position),
            "totals": asdict(self.totals),
        }

    def require_loadable(self, state: dict[str, Any]) -> None:
        """RunError where a resume could not load what the task has returned, or go on: from NaN or inf.

        Periodic averaging sees these at its next boundary, by when no checkpoint of before might be left.
        """
        learns = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if wrong := [name for name, p in learns if not bool(p.isfinite().all())]:
            raise RunError(
                f"NaN or inf in {wrong[0]!r} and {len(wrong) - 1} more: no checkpoint is made of that, the last one "
                "stays; begin anew with a lower --lr, or with --clip-norm"
            )
        if self.carries and (why := self._unlike(schema(_read_back(state["task"])))):
            raise RunError(_said(why))

    def _unlike(self, found: Mapping[str, str]) -> str:
        """The first place where a task's state is not as a new one's; "" for none."""
        for name in sorted(found.keys() | self.template.keys()):
            kind, expected = found.get(name, "missing"), self.template.get(name, "nothing")
            if kind != expected:
                return f"{name:.100} is {kind}, expected {expected} as in a new task's state"
        return ""

    def synchronised(self, state: dict[str, Any]) -> dict[str, Any]:
        """The synchroniser's part of a state."""
        return {name: state[name] for name in self.synchroniser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken; where something does not fit, it may be half loaded."""
        self.model.load_state_dict(state["model"])
        self.synchroniser.load_state_dict(self.synchronised(state))
        if self.carries:
            if why := self._unlike(schema(state["task"])):
                raise ValueError(f"the task's state: {why}")
            self.carries.load_state_dict(state["task"])
        self.generator.set_state(state["generator"])
        self.model_generator.load_state_dict(state)
        self.position, self.totals = counted(Position, state["position"]), counted(Totals, state["totals"])
        self.meter.begin()


def schema_of(state: object) -> dict[str, str]:
    """Schema of a state as it would be loaded; RunError where it could not be."""
    return schema(_read_back(state))


def schema(state: object, name: str = "") -> dict[str, str]:
    """Shape and dtype of every tensor in a state, by its place; all else is a plain value."""
    if isinstance(state, Tensor):
        return {name: f"{tuple(state.shape)} of {state.dtype}"}
    parts = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    found = [schema(part, f"{name}/{key}" if name else str(key)) for key, part in parts]
    nested = {place: kind for each in found for place, kind in each.items()}
    return nested if isinstance(state, Mapping) or any(" of " in kind for kind in nested.values()) else {name: "plain"}


def _read_back(state: object) -> dict[str, Any]:
    """The task's state as a resume would load it: else a state that never can be would show only then."""
    if not isinstance(state, dict):
        raise RunError(_said(f"state_dict() is a {type(state).__name__}, expected a dict"))
    return {name: _as_loaded(value, name) for name, value in state.items()}


def _as_loaded(value: object, name: object) -> object:
    file = BytesIO()
    try:
        torch.save({name: value}, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)[name]
    except Exception:  # whatever pickling, or torch, says of the app's own objects
        expected = "expected tensors, numbers, texts, and lists and dicts of them"
        raise RunError(_said(f"{name!s:.40} is, or has, a {_strange(value)}, {expected}")) from None


def _strange(value: object) -> str:
    """The type of the first part that is none of these."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((type(part).__name__ for part in parts if type(part) not in PLAIN), type(value).__name__)


def _said(why: str) -> str:
    return f"the task's state cannot be loaded again: {why} (state_dict of thinwire_trainer.app.Carries)"
