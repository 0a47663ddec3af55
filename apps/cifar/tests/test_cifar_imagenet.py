"""Folders of JPEG: crops, damaged files, and what is missing."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_files
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from thinwire_cifar.data import imagenet
from thinwire_cifar.data.images import keys
from thinwire_trainer.errors import RunError

units = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 900), st.integers(1, 900), st.lists(units, min_size=imagenet.DRAWN, max_size=imagenet.DRAWN))
def test_a_crop_lies_in_the_image(width: int, height: int, numbers: list[float]) -> None:
    left, upper, right, lower = imagenet.random_crop(width, height, numbers)
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height
    wide, high = right - left, lower - upper
    assert (wide + 1) / max(1, high - 1) > 3 / 4 or wide == high == min(width, height)
    left, upper, right, lower = imagenet.center_crop(width, height)
    assert left >= 0
    assert upper >= 0
    assert right - left == pytest.approx(min(width, height) * 224 / 256)
    assert left + right == pytest.approx(width)
    assert upper + lower == pytest.approx(height)


def test_crops_are_of_all_sizes() -> None:
    from thinwire_cifar.data.images import uniform

    drawn = uniform(keys(0, np.arange(2000)), imagenet.DRAWN).tolist()
    boxes = np.array([imagenet.random_crop(500, 375, numbers) for numbers in drawn])
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (500 * 375)
    assert areas.min() < 0.1
    assert areas.max() > 0.95
    assert 0.4 < areas.mean() < 0.6


def test_images_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = small_files.imagenet(tmp_path)
    images = imagenet.load(tmp_path)
    assert (images.classes, images.channels, images.size) == (2, 3, 224)
    assert images.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert "6 and 6 images in 2 classes instead of 1,281,167" in capsys.readouterr().err
    pixels = images.test.read(torch.tensor([0, 5]), None)
    assert (pixels.shape, pixels.dtype) == ((2, 3, 224, 224), torch.uint8)
    first = Image.open(root / "val" / "n00000000" / "0.JPEG").convert("RGB")
    assert abs(float(pixels[0].float().mean()) - float(np.asarray(first).mean())) < 3
    augmented = images.train.read(torch.tensor([0, 5]), keys(0, np.array([0, 5])))
    alone = images.train.read(torch.tensor([5]), keys(0, np.array([5])))
    assert torch.equal(augmented[1:], alone)


def test_grey_and_transparent_images_are_in_colour(tmp_path: Path) -> None:
    for mode, name in (("L", "grey.JPEG"), ("CMYK", "print.JPEG"), ("RGBA", "png.JPEG")):
        Image.new(mode, (30, 40)).save(tmp_path / name, format="PNG" if mode == "RGBA" else "JPEG")
        assert imagenet.decoded(tmp_path / name, None).shape == (224, 224, 3)


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "flipped", "huge"])
def test_a_damaged_image_is_named(damage: str, tmp_path: Path) -> None:
    root = small_files.imagenet(tmp_path)
    file = root / "train" / "n00000000" / "0.JPEG"
    content = file.read_bytes()
    width = content.index(b"\xff\xc0") + 5  # of the frame: height, width
    damaged = {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "text": b"hello",
        "flipped": b"\0" * 20 + content[20:],
        "huge": content[:width] + b"\xff\xff\xff\xff" + content[width + 4 :],
    }[damage]
    file.write_bytes(damaged)
    with pytest.raises(RunError, match=r"0\.JPEG cannot be decoded"):
        imagenet.load(tmp_path).train.read(torch.tensor([0]), None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_files_are_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    file = small_files.imagenet(tmp_path) / "train" / "n00000000" / "0.JPEG"
    file.unlink()
    make(file)
    with pytest.raises(RunError, match=r"train/n00000000/0\.JPEG is not a regular file, expected a JPEG image"):
        imagenet.load(tmp_path).train.read(torch.tensor([0]), None)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"imagenet/train is missing: get ILSVRC 2012 from https://image-net.org"):
        imagenet.load(tmp_path)
    with pytest.raises(RunError, match="so --download cannot"):
        imagenet.load(tmp_path, download=True)
    root = small_files.imagenet(tmp_path)
    (root / "val" / "n00000001").rename(root / "val" / "n7")
    with pytest.raises(RunError, match="val/n7: no class of this name"):
        imagenet.load(tmp_path)
    (root / "val").rename(root / "elsewhere")
    with pytest.raises(RunError, match=r"val is missing: expected .*/val/CLASS/\*\.JPEG"):
        imagenet.load(tmp_path)
    (root / "val").mkdir()
    with pytest.raises(RunError, match="val has no images"):
        imagenet.load(tmp_path)
