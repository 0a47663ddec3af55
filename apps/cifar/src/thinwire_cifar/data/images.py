"""A data set of labelled images, in memory or read as they are needed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinwire_cifar.data.keyed import Keys

Augment = Callable[[Tensor, Keys], Tensor]
"""Pixels uint8 [n, c, h, w] and a key for each -> the same shape and dtype, changed at random."""


class Split(Protocol):
    """The training or the test images."""

    @property
    def labels(self) -> Tensor:
        """int64 [samples]."""
        ...

    def read(self, indices: Tensor, keys: Keys | None) -> Tensor:
        """Pixels uint8 [n, c, h, w] of these images, augmented by their keys; None: as they are. By any thread."""
        ...

    def told(self) -> Iterable[Tensor | str]:
        """What tells these images from others, for `thinwire_trainer.data`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A split in memory: pixels uint8 [samples, c, h, w] and labels int64 [samples]."""

    pixels: Tensor
    labels: Tensor
    augment: Augment | None = None

    def read(self, indices: Tensor, keys: Keys | None) -> Tensor:
        """See `Split.read`."""
        pixels = self.pixels[indices]
        return pixels if keys is None or self.augment is None else self.augment(pixels, keys)

    def told(self) -> Iterable[Tensor | str]:
        """Labels and pixels: the same ones in files of another format are the same."""
        return [self.labels, self.pixels]


@dataclass(frozen=True, kw_only=True)
class Images:
    """Training and test images; mean and deviation (per channel, in pixel units) of the training images."""

    train: Split
    test: Split
    classes: int
    channels: int
    size: int  # pixels a side
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
