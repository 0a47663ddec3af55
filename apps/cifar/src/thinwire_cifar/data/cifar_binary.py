"""CIFAR's binary version: a file is records of 1 or 2 label bytes, then the red, green and blue planes, row by row."""

from pathlib import Path

import numpy as np
import torch
from thinwire_trainer.errors import RunError

from thinwire_cifar.data.images import Loaded

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
