"""A data set of labelled images, in memory."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, Tensor

Augment = Callable[[Tensor, Generator], Tensor]
"""Pixels uint8 [n, c, h, w] -> the same shape and dtype, changed at random."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Pixels uint8 [n, c, h, w] and labels int64 [n]."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Training and test images; mean and deviation (per channel, in pixel units) of the training images."""

    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augment: Augment | None = None
