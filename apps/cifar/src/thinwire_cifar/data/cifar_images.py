"""Images of both CIFAR sets (Krizhevsky 2009): 32×32 in colour, cropped and mirrored in training.

In the binary version a file is records of 1 or 2 label bytes, then the red, green and blue planes, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from thinwire_trainer.errors import RunError
from torch import Tensor
from torch.nn.functional import pad

from thinwire_cifar.data import published
from thinwire_cifar.data.images import Images, Keys, Loaded, uniform
from thinwire_cifar.data.published import Layout

SIZE = 32  # pixels a side
PIXELS_NBYTES = 3 * SIZE * SIZE
COARSE = 20  # classes of CIFAR-100's first label, which is not trained on


def read(path: Path, content: bytes, *, label_bytes: int, classes: int) -> Loaded:
    """The images of one file, by the last of the label bytes; RunError if it is not of this format."""
    record = label_bytes + PIXELS_NBYTES
    if not content or len(content) % record:
        raise RunError(
            f"{path} has {len(content):,} bytes, expected a multiple of {record:,} (a record is {label_bytes} label "
            f"and {PIXELS_NBYTES:,} pixel bytes): it is truncated or not of the binary version, unpack it again"
        )
    table = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, record).copy())
    labels = table[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise RunError(f"{path} holds label {int(labels.max())}, expected 0 … {classes - 1}: it is not this format")
    if label_bytes > 1 and int(table[:, 0].max()) >= COARSE:
        raise RunError(
            f"{path} holds coarse label {int(table[:, 0].max())}, expected 0 … {COARSE - 1}: it is not this format"
        )
    return Loaded(pixels=table[:, label_bytes:].reshape(-1, 3, SIZE, SIZE), labels=labels)


PADDING = 4  # pixels on each side


def crop_flip(pixels: Tensor, keys: Keys) -> Tensor:
    """Each image [c, h, w] of the batch [n, c, h, w] shifted by at most 4 pixels, black outside; half mirrored."""
    n, _, height, width = pixels.shape
    drawn = torch.from_numpy(uniform(keys, 3))
    shifts = (drawn[:, :2] * (2 * PADDING + 1)).long()
    mirrored = drawn[:, 2:] < 0.5
    rows = shifts[:, :1] + torch.arange(height)  # [n, h]
    columns = shifts[:, 1:] + torch.arange(width)  # [n, w]
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = pad(pixels, (PADDING,) * 4)
    # Indices [n, 1, 1], [n, h, 1] and [n, 1, w] put the channels last: [n, h, w, c].
    cropped = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


SOURCE = "https://www.cs.toronto.edu/~kriz/"
PAGE = f"{SOURCE}cifar.html"

Colour = tuple[float, float, float]
"""Of red, green and blue."""


@dataclass(frozen=True)
class Published:
    """A data set in versions of unlike formats. mean, deviation: of its training pixels."""

    versions: Sequence[Layout]
    classes: int
    mean: Colour
    deviation: Colour

    def load(self, data_dir: Path, *, download: bool = False) -> Images:
        """The data set from `data_dir`, of any version; see `thinwire_cifar.data.published.load`."""
        train, test = published.load(data_dir, self.versions, page=PAGE, download=download, augment=crop_flip)
        shape = {"classes": self.classes, "channels": 3, "size": SIZE}
        return Images(train=train, test=test, mean=self.mean, deviation=self.deviation, **shape)
