"""ImageNet (Russakovsky et al. 2015), or any folders of JPEG by class: train/CLASS/*.JPEG and val/CLASS/*.JPEG.

Images are decoded as they are needed, by the threads that read ahead (Pillow lets go of the interpreter while it
decodes and resizes). Training: a random part of the image of 8 … 100 % of its area, 3/4 … 4/3 as wide as high, mirrored
or not, scaled to 224 × 224 (Szegedy et al. 2015). Test: the middle 224 × 224 of the image whose shorter side is 256.
There may be a million files: what is found is kept in an index.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from thinwire_trainer.errors import RunError
from torch import Tensor

from thinwire_cifar.data.images import Images, Keys, uniform
from thinwire_cifar.data.published import warn

SUFFIXES = (".jpeg", ".jpg")
SETTLED = 2.0  # seconds after which a folder's time tells whether it has changed since


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a split, in the order of classes and names. places: of each image's class in `classes`."""

    root: Path
    classes: list[str]
    names: list[str]
    places: list[int]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, image: int) -> Path:
        """Where it is."""
        return self.root / self.classes[self.places[image]] / self.names[image]


def listing(root: Path, split: str) -> Listing:
    """The images below root/split; RunError if there are none. Only classes that have changed are looked through.

    The index is root/.index-SPLIT.json; where nothing can be written there, every run looks through all folders.
    """
    folder, index = root / split, root / f".index-{split}.json"
    if not folder.is_dir():
        raise RunError(f"{folder} is missing: expected {folder}/CLASS/*.JPEG")
    known, found = _read(index), dict[str, tuple[int, list[str]]]()
    with os.scandir(folder) as entries:
        classes = sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.is_dir())
    for name, changed in classes:
        before = known.get(name)
        found[name] = before if before and before[0] == changed else (_settled(changed), _images(folder / name))
    if found != known:
        _write(index, found)
    names = [(place, image) for place, (_, images) in enumerate(found.values()) for image in images]
    if not names:
        raise RunError(f"{folder} has no images: expected {folder}/CLASS/*.JPEG, sorted into a folder a class")
    return Listing(
        root=folder,
        classes=list(found),
        names=[image for _, image in names],
        places=[place for place, _ in names],
    )


def _images(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(SUFFIXES))


def _settled(changed: int) -> int:
    """The folder's time in ns, or 0 where a change in this very moment would leave it as it is."""
    return changed if time.time() - changed / 1e9 > SETTLED else 0


def _read(index: Path) -> dict[str, tuple[int, list[str]]]:
    """What it says, or nothing if it cannot be trusted: a name is a file in its class's folder, nowhere else."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        return {
            name: (int(changed), [_plain(image) for image in images]) for name, (changed, images) in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _plain(image: Any) -> str:
    if not isinstance(image, str) or "/" in image or not image.lower().endswith(SUFFIXES):
        raise ValueError(image)
    return image


def _write(index: Path, found: Mapping[str, tuple[int, list[str]]]) -> None:
    """At once, by each rank that looked: they all found the same."""
    aside = index.with_name(f"{index.name}.{os.getpid()}")
    with suppress(OSError):
        aside.write_text(json.dumps(found), encoding="utf-8")
        aside.replace(index)


SIZE, RESIZED = 224, 256  # pixels a side
TRAIN_SIZE, TEST_SIZE, CLASSES = 1_281_167, 50_000, 1_000  # as published
PLACES = ("imagenet", "ILSVRC2012", "")  # below the data folder
TRIES = 10  # at a part that fits
DRAWN = 2 * TRIES + 3  # random numbers of an image: area and shape of each try, place, mirrored


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A split whose images are read from their files. labels: int64 [samples]."""

    listing: Listing
    labels: Tensor

    def read(self, indices: Tensor, keys: Keys | None) -> Tensor:
        """See `Split.read`."""
        batch = torch.empty(len(indices), 3, SIZE, SIZE, dtype=torch.uint8)
        drawn = None if keys is None else uniform(keys, DRAWN).tolist()
        for place, index in enumerate(indices.tolist()):
            pixels = decoded(self.listing.path(index), None if drawn is None else drawn[place])
            batch[place] = torch.from_numpy(pixels).permute(2, 0, 1)
        return batch

    def told(self) -> Iterable[Tensor | str]:
        """Labels and names: to read a million files first would take longer than to notice would save."""
        return [self.labels, json.dumps([self.listing.classes, self.listing.names])]


def load(data_dir: Path, *, download: bool = False) -> Images:
    """The data set; RunError, with what to do, where folders are missing, or an image is damaged when it is read."""
    root = next((data_dir / place for place in PLACES if (data_dir / place / "train").is_dir()), None)
    if root is None:
        raise RunError(
            f"{data_dir / 'imagenet' / 'train'} is missing: get ILSVRC 2012 from https://image-net.org (it asks for an "
            f"account{', so --download cannot' if download else ''}) and unpack it into train/CLASS/*.JPEG and "
            f"val/CLASS/*.JPEG"
        )
    train, test = listing(root, "train"), listing(root, "val")
    number = {name: place for place, name in enumerate(train.classes)}
    if strange := [name for name in test.classes if name not in number]:
        raise RunError(f"{root / 'val' / strange[0]}: no class of this name is in {root / 'train'}")
    sizes = (len(train), len(test), len(number))
    said = f"{sizes[0]:,} and {sizes[1]:,} images in {sizes[2]:,} classes instead of 1,281,167 and 50,000 in 1,000"
    warn(root, [said] if sizes != (TRAIN_SIZE, TEST_SIZE, CLASSES) else [])
    splits = [
        Decoded(listing=part, labels=torch.tensor([number[part.classes[place]] for place in part.places]))
        for part in (train, test)
    ]
    return Images(
        train=splits[0],
        test=splits[1],
        classes=len(number),
        channels=3,
        size=SIZE,
        mean=(123.675, 116.28, 103.53),
        deviation=(58.395, 57.12, 57.375),
    )


def decoded(path: Path, numbers: Sequence[float] | None) -> npt.NDArray[np.uint8]:
    """The image as pixels [224, 224, 3]; RunError that names the file if it is damaged, or none: a pipe may never end.

    numbers: DRAWN random ones 0 ≤ u < 1 for a part of it; None: its middle.
    """
    try:
        if not S_ISREG(path.stat().st_mode):
            raise RunError(f"{path} is not a regular file, expected a JPEG image: take it away")
        with Image.open(path, formats=("JPEG", "PNG")) as file:  # one of the published .JPEG files is a PNG
            image = file.convert("RGB")
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise RunError(f"{path} cannot be decoded ({error}): get it again") from None
    box = center_crop(*image.size) if numbers is None else random_crop(*image.size, numbers)
    pixels = np.array(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))
    mirrored = numbers is not None and numbers[-1] < 0.5
    return np.ascontiguousarray(pixels[:, ::-1]) if mirrored else pixels


def center_crop(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, upper, right, lower edge of the square of 224/256 of the shorter side."""
    side = min(width, height) * SIZE / RESIZED
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_crop(width: int, height: int, numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """Left, upper, right, lower edge of a random part: the first of TRIES that fits, else the largest square."""
    across, down, _ = numbers[2 * TRIES :]
    wide = high = min(width, height)
    for area, shape in zip(numbers[0 : 2 * TRIES : 2], numbers[1 : 2 * TRIES : 2], strict=True):
        pixels = width * height * (0.08 + 0.92 * area)
        ratio = (3 / 4) ** (1 - 2 * shape)  # log-uniform in 3/4 … 4/3
        tried = max(1, round(math.sqrt(pixels * ratio))), max(1, round(math.sqrt(pixels / ratio)))
        if tried[0] <= width and tried[1] <= height:
            wide, high = tried
            break
    left, upper = int(across * (width - wide + 1)), int(down * (height - high + 1))
    return left, upper, left + wide, upper + high
