"""Image classification as the trainer's task."""

import pkgutil
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from trainer.command_line.options import Options

from cifar.catalogue import DATASETS, MODELS
from cifar.images import Images, Split


@dataclass(frozen=True)
class Classification:
    """A model that classifies the images of one data set; a `trainer.app.Task`."""

    model: nn.Module
    images: Images
    device: torch.device

    @property
    def train_size(self) -> int:
        """Training samples."""
        return len(self.images.train)

    @property
    def test_size(self) -> int:
        """Test samples."""
        return len(self.images.test)

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        """Mean cross entropy over these training images, augmented."""
        logits, labels = self._classify(self.images.train, indices, generator)
        return cross_entropy(logits, labels)

    def score(self, indices: Tensor) -> Tensor:
        """Cross entropy, number classified rightly, number: sums over these test images."""
        logits, labels = self._classify(self.images.test, indices, None)
        right = (logits.argmax(1) == labels).sum()
        loss = cross_entropy(logits.double(), labels, reduction="sum")
        return torch.stack([loss, right.double(), torch.full_like(loss, len(indices))]).cpu()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Mean loss, and the share classified rightly (0 … 1)."""
        loss, right, samples = sums.tolist()
        return {"test_loss": loss / samples, "test_accuracy": right / samples}

    def _classify(self, split: Split, indices: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
        pixels = split.pixels[indices]
        if generator is not None and self.images.augment is not None:
            pixels = self.images.augment(pixels, generator)
        mean, deviation = (
            torch.tensor(values, device=self.device).view(-1, 1, 1)
            for values in (self.images.mean, self.images.deviation)
        )
        logits = self.model((pixels.to(self.device).float() - mean) / deviation)
        return logits, split.labels[indices].to(self.device)


def build(options: Options, device: torch.device) -> Classification:
    """The task that --dnn and --dataset name; RunError where data are missing or damaged."""
    images: Images = pkgutil.resolve_name(DATASETS[options.dataset])(options.data_dir)
    channels = images.train.pixels.shape[1]
    model: nn.Module = pkgutil.resolve_name(MODELS[options.dnn])(channels=channels, classes=images.classes)
    return Classification(model.to(device), images, device)
