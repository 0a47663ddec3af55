"""The reader of CIFAR-10's binary version, on generated files in the exact format, and the augmentation."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar import cifar10
from cifar.crop_flip import PADDING, crop_flip
from hypothesis import given
from hypothesis import strategies as st
from trainer.errors import RunError

RECORDS = 20


def records(seed: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(seed)
    labels = drawn.integers(0, 10, RECORDS, dtype=np.uint8)
    return labels, drawn.integers(0, 256, (RECORDS, 3, 32, 32), dtype=np.uint8)


def write(path: Path, labels: np.ndarray, pixels: np.ndarray) -> bytes:
    content = b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, pixels, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


def test_labels_and_planes_are_read_as_they_were_written(tmp_path: Path) -> None:
    labels, pixels = records(0)
    content = write(tmp_path / "batch.bin", labels, pixels)
    read = cifar10.read(tmp_path / "batch.bin", records=RECORDS, sha1=hashlib.sha1(content).hexdigest())
    assert read.labels.tolist() == labels.tolist()
    assert torch.equal(read.pixels, torch.from_numpy(pixels))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole data set in small: the same files with fewer records and other checksums."""
    monkeypatch.setattr(cifar10, "RECORDS", RECORDS)
    for seed, files in enumerate([cifar10.TRAIN_FILES, cifar10.TEST_FILES]):
        for number, name in enumerate(dict(files)):
            content = write(tmp_path / cifar10.FOLDER / name, *records(10 * seed + number))
            monkeypatch.setitem(files, name, hashlib.sha1(content).hexdigest())
    return tmp_path


def test_the_data_set_in_order(folder: Path) -> None:
    images = cifar10.load(folder)
    assert (len(images.train), len(images.test), images.classes) == (5 * RECORDS, RECORDS, 10)
    assert images.train.labels[RECORDS : 2 * RECORDS].tolist() == records(1)[0].tolist()
    assert images.augment is crop_flip


def test_a_missing_file_says_where_to_get_it_and_the_layout(folder: Path) -> None:
    missing = folder / cifar10.FOLDER / "data_batch_3.bin"
    missing.unlink()
    with pytest.raises(RunError) as refusal:
        cifar10.load(folder)
    for part in (str(missing), "https://www.cs.toronto.edu/~kriz/cifar.html", "cifar-10-batches-bin", "--data-dir"):
        assert part in str(refusal.value)


def test_a_truncated_file_is_named(folder: Path) -> None:
    truncated = folder / cifar10.FOLDER / "test_batch.bin"
    truncated.write_bytes(truncated.read_bytes()[:-3073])  # whole records: only the length tells
    with pytest.raises(RunError, match=r"test_batch\.bin has 58,387 bytes, expected 61,460"):
        cifar10.load(folder)


def test_a_changed_file_is_named(folder: Path) -> None:
    changed = folder / cifar10.FOLDER / "data_batch_5.bin"
    content = bytearray(changed.read_bytes())
    content[5000] ^= 1
    changed.write_bytes(content)
    with pytest.raises(RunError, match=r"data_batch_5\.bin is not the published file"):
        cifar10.load(folder)


def test_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    labels, pixels = records(0)
    labels[3] = 10
    write(tmp_path / "batch.bin", labels, pixels)
    with pytest.raises(RunError, match="label 10"):
        cifar10.read(tmp_path / "batch.bin", records=RECORDS, sha1=None)


@given(seed=st.integers(0, 2**32), n=st.integers(0, 5), height=st.integers(1, 9), width=st.integers(1, 9))
def test_augmented_images_are_shifted_and_mirrored_copies(seed: int, n: int, height: int, width: int) -> None:
    pixels = torch.randint(1, 256, (n, 3, height, width), dtype=torch.uint8)
    augmented = crop_flip(pixels, torch.Generator().manual_seed(seed))
    assert augmented.shape == pixels.shape
    assert augmented.dtype == torch.uint8
    for before, after in zip(pixels, augmented, strict=True):
        padded = torch.nn.functional.pad(before, (PADDING,) * 4)
        windows = [
            padded[:, top : top + height, left : left + width]
            for top in range(2 * PADDING + 1)
            for left in range(2 * PADDING + 1)
        ]
        assert any(torch.equal(after, window) or torch.equal(after, window.flip(2)) for window in windows)


def test_half_are_mirrored_and_every_shift_occurs() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    augmented = crop_flip(image.expand(4000, 1, 4, 4), torch.Generator().manual_seed(0))
    unshifted = (augmented == image).flatten(1).all(1).sum()
    mirrored = (augmented == image.flip(3)).flatten(1).all(1).sum()
    assert 10 < unshifted < 45  # 4,000 / (81 · 2) = 25 in expectation
    assert 10 < mirrored < 45
    assert len({tuple(one.flatten().tolist()) for one in augmented}) > 81
