"""What is trained: the one interface between the loop and an app."""

from typing import Protocol

from torch import Generator, Tensor, nn


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

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        """Mean loss (a scalar) of the model over these training samples; augmentation draws from `generator`."""
        ...

    def score(self, indices: Tensor) -> Tensor:
        """Sums over these test samples, float64, shape [s]: added over batches and ranks, then given to `metrics`."""
        ...

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The test metrics by name (`test_loss`, `test_accuracy`, …) that the sums over all test samples mean."""
        ...
