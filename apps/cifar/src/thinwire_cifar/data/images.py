"""Labelled images, in memory or read as they are needed, and random numbers by key for their augmentation.

A sample's random numbers are a function of run, epoch and sample alone, whoever reads it, and when. So reading ahead,
in any number of threads, and a resume give the same bits. SplitMix64 (Steele et al. 2014): the stream of a key is the
same on every machine and with every version of NumPy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Keys = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(seed: int, indices: npt.NDArray[np.int64]) -> Keys:
    """One for each sample [n]. seed: 64 bits, of one epoch of one run."""
    return _mixed(_mixed(np.array([seed], np.uint64)) + indices.astype(np.uint64) * GOLDEN)


def uniform(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """The first `count` numbers 0 ≤ u < 1 of each key [n, count]."""
    drawn = _mixed(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
    return (drawn >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mixed(x: Keys) -> Keys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Augment = Callable[[Tensor, Keys], Tensor]
"""Pixels uint8 [n, c, h, w] and a key for each -> the same shape and dtype, changed at random."""


class Split(Protocol):
    """The training or the test images."""

    @property
    def labels(self) -> Tensor:
        """int64 [samples]."""

    def read(self, indices: Tensor, keys: Keys | None) -> Tensor:
        """Pixels uint8 [n, c, h, w] of these images, augmented by their keys; None: as they are. By any thread."""

    def told(self) -> Iterable[Tensor | str]:
        """Content that tells these images from others, for `thinwire_trainer.data`."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A split in memory: pixels uint8 [samples, c, h, w] and labels int64 [samples]."""

    pixels: Tensor
    labels: Tensor
    augment: Augment | None = None

    def read(self, indices: Tensor, keys: Keys | None) -> Tensor:
        """Pixels of these images (`Split.read`)."""
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
