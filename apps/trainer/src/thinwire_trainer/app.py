"""Interface between an app and the trainer: names, flags and the task to train. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor, nn

    from thinwire_trainer.command_line.flag import Flag
    from thinwire_trainer.command_line.options import Options
    from thinwire_trainer.data import Faults
    from thinwire_trainer.synchronisers.table import Synchronisation


@dataclass(frozen=True, kw_only=True)
class App:
    """An app is what `python -m MODULE` starts: its models, its data sets, and how a task is made of them."""

    module: str
    models: Mapping[str, str]  # name -> "package.module:function", resolved only when used
    datasets: Mapping[str, str]
    build: Callable[[Options, torch.device], Task]  # raises RunError where data are missing or damaged
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the command line, by option name
    ignores: frozenset[str] = frozenset()  # flags that it has no use for, such as "label_smoothing": refused
    synchronisations: Mapping[str, Synchronisation] = field(default_factory=dict)  # by --algorithm, besides the usual
    own_models: bool = False  # whether `build` takes --dnn package.module:function
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # names of models that another app has -> which
    bundled: Mapping[str, str] = field(default_factory=dict)  # names of data sets that need no files -> why
    flags: Sequence[Flag] = ()  # its own, which `Options.app` has by name
    check: Callable[[Options], None] = lambda options: None  # raises RunError for flags that do not fit together
    commands: Mapping[str, str] = field(default_factory=dict)  # python -m MODULE NAME …: see `trainer.command`


class Task(Protocol):
    """A model with its data. Samples are named by their index; the loop decides who takes which, unless `Batches` does.

    Optional parts of a task: `Batches`, `Carries`, `Reads`, `Keeps`, `LeavesOut`.
    """

    @property
    def model(self) -> nn.Module:
        """Model to train, already on its device."""

    @property
    def train_size(self) -> int:
        """Training samples."""

    @property
    def test_size(self) -> int:
        """Test samples."""

    def loss(self, batch: Any, generator: Generator) -> Tensor:
        """Mean loss (a scalar) of the model over these training samples: indices, or as `Batches` name them, or `Reads`
        read them. Called once a step, in their order.

        What is random in the model's own input draws from `generator`.
        """

    def score(self, batch: Any) -> Tensor:
        """Sums over these test samples, float64, shape [s]: added over batches and ranks, then given to `metrics`.

        batch: indices, or what `Batches` name, or `Reads` read; it may be empty. In their order.
        """

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The test metrics by name (`test_loss`, `test_accuracy`, …) that the sums over all test samples mean."""


@runtime_checkable
class Batches(Protocol):
    """Optional part of a `Task`: its own batches, and which rank takes which, in which order, such as utterances of
    alike length, or streams of text that go on from batch to batch.

    A batch's name is whatever the task likes: it is what `loss` and `score`, or `read_train` and `read_test`, are
    given. Without this they are indices, dealt out by `thinwire_trainer.training.batches`.
    """

    def train_batches(self, *, rank: int, size: int, batch_size: int, seed: int, epoch: int) -> Sequence[Any]:
        """This rank's batches of this epoch, in order: a function of what is given alone, so that a resume finds them.

        As many on every rank and in every epoch, at least one; the ranks' gradients count alike. size: number of
        ranks. batch_size: --batch-size. RunError where that cannot be, such as too little data for so many ranks.
        """

    def test_batches(self, *, rank: int, size: int) -> Sequence[Any]:
        """This rank's test batches, in order: over all ranks each sample once. At least one, which may be empty."""

    def weight(self, batch: Any) -> int:
        """Weight of a batch in the epoch's mean training loss: its samples, tokens or frames."""


@runtime_checkable
class Carries(Protocol):
    """Optional part of a `Task`: a state that goes on from batch to batch on this rank, such as an LSTM's hidden state.
    A checkpoint has it, each rank's own.

    What a new task returns is a template: later states have the same keys, shapes and dtypes. With another number of
    ranks it begins anew, as at an epoch's beginning, where that alone is possible. An nn.Module has these methods, too:
    a task that is one itself would have its weights in every checkpoint twice, so a task holds its model instead.
    """

    def state_dict(self) -> dict[str, Any]:
        """All that later batches depend on besides the model, for torch.load(weights_only=True)."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to where `state` was taken; it is on the CPU, and is not to be changed."""


@runtime_checkable
class Keeps(Protocol):
    """Optional part of a `Task`: what the app's commands need to use the trained model where the data are not."""

    def kept(self) -> dict[str, Any]:
        """Such as a vocabulary: for JSON. A run keeps it in task.json, and goes on only with the same.

        So data should have a fingerprint in it (`thinwire_trainer.data`).
        Names are for messages: train_data.
        """


@runtime_checkable
class LeavesOut(Protocol):
    """Optional part of a `Task`: data that it left out, as they could not be used. A run tells once of the first
    ones why, and its metrics count them (`skipped`)."""

    @property
    def faults(self) -> Faults:
        """Faults of all data that were looked at."""


@runtime_checkable
class Reads(Protocol):
    """Optional part of a `Task`: its samples are read ahead, in threads, while the model computes.

    Both methods are called from several threads at once and are functions of what they are given alone: so a resume,
    and any number of threads, give the same bits. What they return is what `loss` and `score` take. indices: or what
    `Batches` name.
    """

    def read_train(self, indices: Any, seed: int) -> Any:
        """These training samples, augmented; a sample's random numbers are those of its index and the epoch's seed."""

    def read_test(self, indices: Any) -> Any:
        """These test samples."""
