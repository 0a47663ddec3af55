"""MNIST (LeCun et al. 1998): 60,000 training and 10,000 test images, 28×28, grey; idx files, also compressed (.gz).

An idx file begins with 0, 0, the type of an element (8: unsigned byte) and the number of dimensions; then the length of
each dimension, 32 bits, most significant byte first; then the elements.
"""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from thinwire_trainer.data import one_at_a_time
from thinwire_trainer.errors import RunError

from thinwire_cifar.data.images import Images, Loaded
from thinwire_cifar.data.published import Remote, difference, fetch, warn

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
PLACES = ("", "mnist", "MNIST/raw")  # below the data folder; the last is torchvision's
SIZE, CLASSES = 28, 10
LARGEST = 1 << 32  # bytes; a header that claims more is damaged

Files = dict[str, tuple[int, list[tuple[str, str, str]]]]
"""split -> (images, [(file, MD5 of its content, MD5 of the published .gz) of pixels and of labels])"""
FILES: Files = {
    "train": (
        60_000,
        [
            ("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"),
        ],
    ),
    "test": (
        10_000,
        [
            ("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c"),
        ],
    ),
}


@dataclass(frozen=True)
class Published:
    """A data set in MNIST's format. places: below the data folder. mean, deviation: of its training pixels."""

    source: str
    places: tuple[str, ...]
    files: Files
    mean: float
    deviation: float

    def load(self, data_dir: Path, *, download: bool = False) -> Images:
        """The data set; RunError, with what to do, if a file is missing, truncated or of another format.

        Files of another length or checksum are used, with one warning.
        """
        if download:
            self._download(data_dir)
        differences: list[str] = []
        train, test = (self._split(data_dir, split, differences) for split in self.files)
        warn(data_dir, differences)
        shape = {"classes": CLASSES, "channels": 1, "size": SIZE}
        return Images(train=train, test=test, mean=(self.mean,), deviation=(self.deviation,), **shape)

    def _split(self, data_dir: Path, split: str, differences: list[str]) -> Loaded:
        expected, files = self.files[split]
        arrays = []
        for (name, md5, _), dimensions in zip(files, (3, 1), strict=True):
            path = self._found(data_dir, name)
            array, content = read_idx(path, dimensions=dimensions, source=self.source)
            sizes = {"records": len(array), "expected": expected}
            differences.append(difference(path.name, content, checksum=f"md5:{md5}", **sizes))
            arrays.append(array)
        pixels, labels = arrays
        _check(data_dir, split, pixels, labels)
        numbers = torch.from_numpy(labels.astype(np.int64))
        return Loaded(pixels=torch.from_numpy(pixels.copy()).unsqueeze(1), labels=numbers)

    def _paths(self, data_dir: Path, name: str) -> list[Path]:
        return [data_dir / place / file for place in self.places for file in (name, f"{name}.gz")]

    def _found(self, data_dir: Path, name: str) -> Path:
        for path in self._paths(data_dir, name):
            if path.is_file():
                return path
        first, also = data_dir / self.places[0] / name, " or ".join(filter(None, self.places))
        raise RunError(
            f"{first} is missing (or {name}.gz; also below {also}): get it from {self.source}{name}.gz, or give "
            "--download"
        )

    def _download(self, data_dir: Path) -> None:
        with one_at_a_time(data_dir):
            for _, files in self.files.values():
                for name, _, md5 in files:
                    if not any(path.is_file() for path in self._paths(data_dir, name)):
                        fetch(Remote(url=f"{self.source}{name}.gz", checksum=f"md5:{md5}"), data_dir / self.places[0])


MNIST = Published(SOURCE, PLACES, FILES, mean=33.3, deviation=78.6)
load = MNIST.load


def read_idx(path: Path, *, dimensions: int, source: str = SOURCE) -> tuple[npt.NDArray[np.uint8], bytes]:
    """The array of one file, and the file's content, decompressed; RunError if it is truncated or of another format."""
    header = 4 + 4 * dimensions
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            begin = file.read(header)
            if len(begin) == header and begin[:4] != bytes([0, 0, 8, dimensions]):
                raise RunError(
                    f"{path} begins with {begin[:4].hex(' ')}, expected 00 00 08 {dimensions:02x} (idx, bytes in "
                    f"{dimensions} dimensions): it is another file"
                )
            shape = np.frombuffer(begin[4:], ">u4").tolist() if len(begin) == header else [0]
            expected = math.prod(shape)
            content = file.read(min(expected, LARGEST) + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RunError(f"{path} is truncated or damaged ({error}): get it again from {source}") from None
    if len(begin) < header:
        raise RunError(f"{path} has {len(begin)} bytes, a header alone has {header}: it is truncated")
    if len(content) != expected:
        claimed = f"{' × '.join(map(str, shape))} bytes"
        has = "more" if len(content) > expected else f"{len(content):,}"
        raise RunError(f"{path} is truncated or damaged: its header says {claimed}, and it has {has}")
    return np.frombuffer(content, np.uint8).reshape(shape), begin + content


def _check(folder: Path, split: str, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> None:
    if pixels.shape[1:] != (SIZE, SIZE):
        raise RunError(
            f"{folder}: the {split} images have {pixels.shape[1]} × {pixels.shape[2]} pixels, expected 28 × 28"
        )
    if len(pixels) != len(labels) or not len(labels):
        raise RunError(f"{folder}: {len(pixels):,} {split} images and {len(labels):,} labels, expected one for each")
    if labels.max() >= CLASSES:
        raise RunError(f"{folder}: a {split} label is {labels.max()}, expected 0 … {CLASSES - 1}")
