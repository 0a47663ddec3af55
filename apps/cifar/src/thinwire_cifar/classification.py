"""Image classification as the trainer's task."""

import pkgutil
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.data import fingerprint
from thinwire_trainer.launching.device import pinned
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire_cifar.catalogue import DATASETS, MODELS
from thinwire_cifar.data.images import Images, keys
from thinwire_cifar.own_model import built


class Batch(NamedTuple):
    """Pixels uint8 [n, c, h, w] and labels int64 [n], in the host's memory."""

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Classification:
    """A model that classifies the images of one data set; a `thinwire_trainer.app.Task` that reads ahead."""

    model: nn.Module
    images: Images
    device: torch.device
    label_smoothing: float = 0.0

    @property
    def train_size(self) -> int:
        """Training samples."""
        return len(self.images.train.labels)

    @property
    def test_size(self) -> int:
        """Test samples."""
        return len(self.images.test.labels)

    def read_train(self, indices: Tensor, seed: int) -> Batch:
        """These training images, augmented: a function of seed and index alone."""
        split = self.images.train
        return self._batch(split.read(indices, keys(seed, indices.numpy())), split.labels[indices])

    def read_test(self, indices: Tensor) -> Batch:
        """These test images."""
        split = self.images.test
        return self._batch(split.read(indices, None), split.labels[indices])

    def loss(self, batch: Batch, generator: Generator) -> Tensor:
        """Mean cross entropy over training images that were read."""
        del generator  # augmentation has keys
        logits, labels = self._classify(batch)
        return cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def score(self, batch: Batch) -> Tensor:
        """Cross entropy, number classified rightly, number: sums over test images that were read."""
        logits, labels = self._classify(batch)
        right = (logits.argmax(1) == labels).sum()
        loss = cross_entropy(logits.double(), labels, reduction="sum")
        return torch.stack([loss, right.double(), torch.full_like(loss, len(labels))]).cpu()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Mean loss, and the share classified rightly (0 … 1)."""
        loss, right, samples = sums.tolist()
        return {"test_loss": loss / samples, "test_accuracy": right / samples}

    def kept(self) -> dict[str, Any]:
        """Fingerprints of these images."""
        images = self.images
        return {"train_data": fingerprint(images.train.told()), "test_data": fingerprint(images.test.told())}

    @cached_property
    def _statistics(self) -> tuple[Tensor, Tensor]:
        mean, deviation = (
            torch.tensor(values, device=self.device).view(-1, 1, 1)
            for values in (self.images.mean, self.images.deviation)
        )
        return mean, deviation

    def _batch(self, *parts: Tensor) -> Batch:
        return Batch(*pinned(parts, self.device))

    def _classify(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pixels, labels = (part.to(self.device, non_blocking=True) for part in batch)
        mean, deviation = self._statistics
        return self.model((pixels.float() - mean) / deviation), labels


def build(options: Options, device: torch.device) -> Classification:
    """The task that --dnn and --dataset name; RunError where data are missing or damaged, or do not fit the model."""
    images: Images = pkgutil.resolve_name(DATASETS[options.dataset])(options.data_dir, download=options.download)
    model = built(options.dnn, MODELS.get(options.dnn, options.dnn), images)
    return Classification(model.to(device), images, device, label_smoothing=options.label_smoothing)
