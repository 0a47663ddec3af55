"""ImageNet (Russakovsky et al. 2015), or any folders of JPEG by class: train/CLASS/*.JPEG and val/CLASS/*.JPEG.

Images are decoded as they are needed, by the threads that read ahead (Pillow lets go of the interpreter while it
decodes and resizes). Training: a random part of the image of 8 … 100 % of its area, 3/4 … 4/3 as wide as high, mirrored
or not, scaled to 224 × 224 (Szegedy et al. 2015). Test: the middle 224 × 224 of the image whose shorter side is 256.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from thinwire_trainer.errors import RunError
from torch import Tensor

from thinwire_cifar.data.images import Images, Keys, uniform
from thinwire_cifar.data.published import warn

SUFFIXES = (".jpeg", ".jpg")
SIZE, RESIZED = 224, 256  # pixels a side
TRAIN_SIZE, TEST_SIZE, CLASSES = 1_281_167, 50_000, 1_000  # as published
PLACES = ("imagenet", "ILSVRC2012", "")  # below the data folder
TRIES = 10  # at a part that fits
DRAWN = 2 * TRIES + 3  # random numbers of an image: area and shape of each try, place, mirrored


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A split whose images are read from their files. files: class and name of each; labels: int64 [samples]."""

    folder: Path
    files: list[tuple[str, str]]
    labels: Tensor

    def read(self, indices: Tensor, keys: Keys | None) -> Tensor:
        """Pixels of these images (`Split.read`)."""
        batch = torch.empty(len(indices), 3, SIZE, SIZE, dtype=torch.uint8)
        drawn = None if keys is None else uniform(keys, DRAWN).tolist()
        for place, index in enumerate(indices.tolist()):
            pixels = decoded(self.folder.joinpath(*self.files[index]), None if drawn is None else drawn[place])
            batch[place] = torch.from_numpy(pixels).permute(2, 0, 1)
        return batch

    def told(self) -> Iterable[Tensor | str]:
        """Labels and names: to read a million files first would take longer than to notice would save."""
        return [self.labels, json.dumps(self.files)]


def load(data_dir: Path, *, download: bool = False) -> Images:
    """The data set; RunError, with what to do, where folders are missing, or an image is damaged when it is read."""
    root = next((data_dir / place for place in PLACES if (data_dir / place / "train").is_dir()), None)
    if root is None:
        raise RunError(
            f"{data_dir / 'imagenet' / 'train'} is missing: get ILSVRC 2012 from https://image-net.org (it asks for an "
            f"account{', so --download cannot' if download else ''}) and unpack it into train/CLASS/*.JPEG and "
            f"val/CLASS/*.JPEG"
        )
    train, test = listing(root / "train"), listing(root / "val")
    number = {name: place for place, name in enumerate(dict(train))}
    if strange := [name for name in dict(test) if name not in number]:
        raise RunError(f"{root / 'val' / strange[0]}: no class of this name is in {root / 'train'}")
    sizes = (len(train), len(test), len(number))
    said = f"{sizes[0]:,} and {sizes[1]:,} images in {sizes[2]:,} classes instead of 1,281,167 and 50,000 in 1,000"
    warn(root, [said] if sizes != (TRAIN_SIZE, TEST_SIZE, CLASSES) else [])
    splits = [
        Decoded(folder=root / name, files=files, labels=torch.tensor([number[place] for place, _ in files]))
        for name, files in (("train", train), ("val", test))
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


def listing(folder: Path) -> list[tuple[str, str]]:
    """Class and name of every image below the folder, in their order; RunError if there are none."""
    if not folder.is_dir():
        raise RunError(f"{folder} is missing: expected {folder}/CLASS/*.JPEG")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    found = [(name, image) for name in classes for image in sorted(os.listdir(folder / name))]
    images = [(name, image) for name, image in found if image.lower().endswith(SUFFIXES)]
    if not images:
        raise RunError(f"{folder} has no images: expected {folder}/CLASS/*.JPEG, sorted into a folder a class")
    return images


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
