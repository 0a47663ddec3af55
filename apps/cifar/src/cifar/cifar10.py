"""CIFAR-10 (Krizhevsky 2009), binary version: 50,000 training and 10,000 test images, 32×32 in colour.

A file holds 10,000 records of 1 + 3,072 bytes: the label, then the red, green and blue planes, row by row.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from trainer.errors import RunError

from cifar.crop_flip import crop_flip
from cifar.images import Images, Split

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
FOLDER = "cifar-10-batches-bin"
SHAPE = (3, 32, 32)
RECORD_NBYTES = 1 + 3 * 32 * 32
RECORDS = 10_000  # per file
CLASSES = 10

# SHA-1 as published with the Gluon data sets (mxnet.gluon.data.vision.CIFAR10).
TRAIN_FILES = {
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
}
TEST_FILES = {"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"}


def load(data_dir: Path) -> Images:
    """The data set from `data_dir`; RunError, with what to do, if a file is missing, truncated or damaged."""
    folder = data_dir / FOLDER
    for name in TRAIN_FILES | TEST_FILES:
        _require(folder / name)
    return Images(
        train=_split(folder, TRAIN_FILES),
        test=_split(folder, TEST_FILES),
        classes=CLASSES,
        mean=(125.3, 123.0, 113.9),
        deviation=(63.0, 62.1, 66.7),
        augment=crop_flip,
    )


def read(path: Path, *, records: int, sha1: str | None) -> Split:
    """The images of one file that is to hold so many records; RunError if it does not, or has another checksum."""
    content = path.read_bytes()
    if len(content) != records * RECORD_NBYTES:
        raise RunError(
            f"{path} has {len(content):,} bytes, expected {records * RECORD_NBYTES:,} ({records:,} records of "
            f"{RECORD_NBYTES:,}): unpack it again from cifar-10-binary.tar.gz, from {SOURCE}"
        )
    if sha1 is not None and hashlib.sha1(content, usedforsecurity=False).hexdigest() != sha1:
        raise RunError(f"{path} is not the published file (expected SHA-1 {sha1}): get it again from {SOURCE}")
    table = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(records, RECORD_NBYTES).copy())
    return Split(pixels=table[:, 1:].reshape(records, *SHAPE), labels=_labels(table[:, 0], path))


def _labels(column: Tensor, path: Path) -> Tensor:
    if len(column) and int(column.max()) >= CLASSES:
        raise RunError(f"{path} holds label {int(column.max())}, expected 0 … {CLASSES - 1}: it is not this format")
    return column.long()


def _split(folder: Path, files: dict[str, str]) -> Split:
    parts = [read(folder / name, records=RECORDS, sha1=sha1) for name, sha1 in files.items()]
    return Split(pixels=torch.cat([part.pixels for part in parts]), labels=torch.cat([part.labels for part in parts]))


def _require(path: Path) -> None:
    if not path.is_file():
        raise RunError(
            f"{path} is missing: get the binary version of CIFAR-10 from {SOURCE} and unpack it, so that "
            f"--data-dir DIR holds DIR/{FOLDER}/{{{', '.join(TRAIN_FILES | TEST_FILES)}}}"
        )
