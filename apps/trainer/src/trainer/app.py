"""What an app tells the trainer about itself and gives it to train, without importing anything heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor, nn

    from trainer.command_line.options import Options
    from trainer.synchronisers.table import Synchronisation


@dataclass(frozen=True, kw_only=True)
class App:
    """An app is what `python -m MODULE` starts: its models, its data sets, and how a task is made of them."""

    module: str
    models: Mapping[str, str]  # name -> "package.module:function", resolved only when used
    datasets: Mapping[str, str]
    build: Callable[[Options, torch.device], Task]  # raises RunError where data are missing or damaged
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the command line, by option name
    ignores: frozenset[str] = frozenset()  # flags that its loss has no use for: "label_smoothing"
    synchronisations: Mapping[str, Synchronisation] = field(default_factory=dict)  # by --algorithm, besides the usual
    own_models: bool = False  # whether `build` takes --dnn package.module:function
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # names of models that another app has -> which


class Task(Protocol):
    """A model with its data. Samples are named by their index; the loop decides who takes which."""

    @property
    def model(self) -> nn.Module:
        """What is trained, already on its device."""
        ...

    @property
    def train_size(self) -> int:
        """Training samples."""
        ...

    @property
    def test_size(self) -> int:
        """Test samples."""
        ...

    def loss(self, batch: Any, generator: Generator) -> Tensor:
        """Mean loss (a scalar) of the model over these training samples, by their indices, or as `Reads` read them.

        What is random in the model's own input draws from `generator`.
        """
        ...

    def score(self, batch: Any) -> Tensor:
        """Sums over these test samples, float64, shape [s]: added over batches and ranks, then given to `metrics`.

        batch: indices, or what `Reads` read; it may be empty.
        """
        ...

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The test metrics by name (`test_loss`, `test_accuracy`, …) that the sums over all test samples mean."""
        ...


@runtime_checkable
class Reads(Protocol):
    """What a `Task` may have besides: its samples are then read ahead, in threads, while the model computes.

    Both methods are called from several threads at once and are functions of what they are given alone: so a resume,
    and any number of threads, give the same bits. What they return is what `loss` and `score` take.
    """

    def read_train(self, indices: Tensor, seed: int) -> Any:
        """These training samples, augmented; a sample's random numbers are those of its index and the epoch's seed."""
        ...

    def read_test(self, indices: Tensor) -> Any:
        """These test samples."""
        ...
