"""What both CIFAR sets are (Krizhevsky 2009): 32×32 in colour, cropped and mirrored in training."""

from collections.abc import Sequence
from pathlib import Path

from thinwire_cifar.data import cifar_binary, layouts
from thinwire_cifar.data.crop_flip import crop_flip
from thinwire_cifar.data.images import Images
from thinwire_cifar.data.layouts import Layout

SOURCE = "https://www.cs.toronto.edu/~kriz/"
PAGE = f"{SOURCE}cifar.html"

Colour = tuple[float, float, float]
"""Of red, green and blue."""


def load(
    data_dir: Path, versions: Sequence[Layout], *, classes: int, mean: Colour, deviation: Colour, download: bool
) -> Images:
    """A data set from `data_dir`, of any of its versions; see `thinwire_cifar.data.layouts.load`."""
    train, test = layouts.load(data_dir, versions, page=PAGE, download=download, augment=crop_flip)
    return Images(
        train=train,
        test=test,
        classes=classes,
        channels=3,
        size=cifar_binary.SIZE,
        mean=mean,
        deviation=deviation,
    )
