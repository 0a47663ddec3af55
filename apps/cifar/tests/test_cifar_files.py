"""Every reader on small files in the exact format, and on missing, truncated, wrong and damaged ones."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import small_files
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_files import IMAGES, binary_content, drawn, idx_content, published_python_content, python_content, write
from thinwire_cifar.data import cifar10, cifar100, cifar_images, cifar_python, fashion_mnist, mnist, published
from thinwire_cifar.data.cifar_images import crop_flip
from thinwire_cifar.data.images import Images, Loaded
from thinwire_trainer.errors import RunError

pytestmark = pytest.mark.quick

PIXELS, LABELS = drawn(0)


# layout -> (what writes it, what loads it, files of training images, a training file)
SETS: dict[str, tuple[Callable[..., Path], Callable[..., Images], int, str]] = {
    "cifar10 binary": (small_files.cifar10_binary, cifar10.load, 5, "data_batch_1.bin"),
    "cifar10 python": (small_files.cifar10_python, cifar10.load, 5, "data_batch_1"),
    "cifar100 binary": (small_files.cifar100_binary, cifar100.load, 1, "train.bin"),
    "cifar100 python": (small_files.cifar100_python, cifar100.load, 1, "train"),
    "mnist": (small_files.mnist, mnist.load, 1, "train-images-idx3-ubyte"),
    "fashion-mnist": (small_files.fashion_mnist, fashion_mnist.load, 1, "train-images-idx3-ubyte.gz"),
    "mnist, .gz": (small_files.mnist_compressed, mnist.load, 1, "train-images-idx3-ubyte.gz"),
}


@pytest.mark.parametrize("layout", SETS)
def test_small_files_are_used_with_one_warning(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, load, files, name = SETS[layout]
    make(tmp_path)
    images = load(tmp_path)
    assert (len(images.train.labels), len(images.test.labels)) == (files * IMAGES, IMAGES)
    shape, classes = (images.channels, images.size, images.size), images.classes
    for seed, (split, at) in enumerate([*((images.train, n) for n in range(files)), (images.test, 0)]):
        pixels, labels = drawn(seed, shape=shape[int(shape[0] == 1) :], classes=classes)
        part = torch.arange(at * IMAGES, (at + 1) * IMAGES)
        assert torch.equal(split.read(part, None), torch.from_numpy(pixels.reshape(-1, *shape)))
        assert split.labels[part].tolist() == labels.tolist()
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"cifar: warning: {tmp_path}")
    assert f"{name} has 6 images instead of" in warning


def test_training_images_are_augmented_and_test_images_are_not(tmp_path: Path) -> None:
    small_files.cifar10_binary(tmp_path)
    images = cifar10.load(tmp_path)
    assert isinstance(images.train, Loaded)
    assert isinstance(images.test, Loaded)
    assert (images.train.augment, images.test.augment) == (crop_flip, None)


@pytest.mark.parametrize("layout", ["cifar10 binary", "cifar10 python"])
def test_the_published_files_are_used_without_a_word(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recognised by length and checksum, which are those of other files here."""
    SETS[layout][0](tmp_path)
    monkeypatch.setattr(published, "difference", difference_of_small_files := lambda name, content, **published: "")
    monkeypatch.setattr("thinwire_cifar.data.published.difference", difference_of_small_files)
    cifar10.load(tmp_path)
    assert capsys.readouterr().err == ""


def test_differences() -> None:
    same = {"records": 6, "expected": 6, "checksum": "md5:9e107d9d372bb6826bd81d3542a419d6"}
    text = b"The quick brown fox jumps over the lazy dog"
    assert published.difference("x", text, **same) == ""
    assert published.difference("x", text[1:], **same) == "x has another MD5"
    assert published.difference("x", text, **{**same, "records": 5}) == "x has 5 images instead of 6"
    sha1 = same | {"checksum": "sha1:2fd4e1c67a2d28fced849ee1bb76e7391b93eb12"}
    assert published.difference("x", text, **sha1) == ""


def test_one_rank_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    published.warn(tmp_path, ["x has another MD5"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("layout", SETS)
def test_what_is_missing_and_where_to_get_it(layout: str, tmp_path: Path) -> None:
    make, load, _, name = SETS[layout]
    with pytest.raises(RunError) as nothing:
        load(tmp_path / "nowhere")
    folder = make(tmp_path)
    assert str(tmp_path / "nowhere") in str(nothing.value)
    assert "https://" in str(nothing.value)
    assert "--download" in str(nothing.value)
    (folder / name).unlink()
    with pytest.raises(RunError, match=r"is missing") as one:
        load(tmp_path)
    assert str(folder / name.removesuffix(".gz")) in str(one.value)


@pytest.mark.parametrize("layout", SETS)
@pytest.mark.parametrize("kept", [0, 1, 7, 0.4, -1])
def test_truncated_files_are_named(layout: str, kept: float, tmp_path: Path) -> None:
    make, load, _, name = SETS[layout]
    file = make(tmp_path) / name
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(RunError) as error:
        load(tmp_path)
    assert str(file) in str(error.value)
    assert "truncated" in str(error.value) or "damaged" in str(error.value)


@pytest.mark.parametrize("layout", SETS)
def test_a_file_of_another_kind_is_named(layout: str, tmp_path: Path) -> None:
    make, load, _, name = SETS[layout]
    file = make(tmp_path) / name
    write(file, b"\x89PNG\r\n\x1a\n" + bytes(5000))
    with pytest.raises(RunError) as error:
        load(tmp_path)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"\0\0\x0d\3" + idx_content(np.zeros((2, 28, 28), np.uint8))[4:],
            "begins with 00 00 0d 03, expected 00 00 08 03",
        ),
        (idx_content(np.zeros(5, np.uint8)) + bytes(11), "begins with 00 00 08 01, expected 00 00 08 03"),
        (idx_content(np.zeros((6, 28, 28), np.uint8)) + b"\0", "6 × 28 × 28 bytes, and it has more"),
        (idx_content(np.zeros((6, 28, 28), np.uint8))[:-1], "6 × 28 × 28 bytes, and it has 4,703"),
        (b"\0\0\x08\3" + b"\xff" * 12, "4294967295 × 4294967295 × 4294967295 bytes, and it has 0"),
        (idx_content(np.zeros((6, 27, 28), np.uint8)), "27 × 28 pixels, expected 28 × 28"),
        (idx_content(np.zeros((5, 28, 28), np.uint8)), "5 train images and 6 labels"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_that_is_wrong(content: bytes, says: str, suffix: str, tmp_path: Path) -> None:
    small_files.mnist(tmp_path, suffix=suffix)
    write(tmp_path / f"train-images-idx3-ubyte{suffix}", content)
    with pytest.raises(RunError) as error:
        mnist.load(tmp_path)
    assert says in str(error.value)


def test_labels_out_of_range(tmp_path: Path) -> None:
    labels = LABELS.copy()
    labels[3] = 10
    with pytest.raises(RunError, match="x holds label 10, expected 0 … 9"):
        cifar_images.read(Path("x"), binary_content(PIXELS, labels), label_bytes=1, classes=10)
    with pytest.raises(RunError, match="labels of n numbers 0 … 9"):
        cifar_python.read(Path("x"), published_python_content(PIXELS, labels), key="labels", classes=10)
    small_files.mnist(tmp_path)
    write(tmp_path / "t10k-labels-idx1-ubyte", idx_content(labels))
    with pytest.raises(RunError, match="a test label is 10"):
        mnist.load(tmp_path)


def test_coarse_labels_out_of_range() -> None:
    """Of CIFAR-100, where nothing is trained on them; a file that has others is another one."""
    fine = binary_content(PIXELS, LABELS, coarse=True)
    assert cifar_images.read(Path("x"), b"\x13" + fine[1:], label_bytes=2, classes=100).labels.tolist() == list(LABELS)
    with pytest.raises(RunError, match="x holds coarse label 20, expected 0 … 19"):
        cifar_images.read(Path("x"), b"\x14" + fine[1:], label_bytes=2, classes=100)
    for coarse, right in ((19, True), (20, False)):
        table = {"data": PIXELS.reshape(len(PIXELS), -1), "fine_labels": [int(n) for n in LABELS]}
        content = pickle.dumps(table | {"coarse_labels": [coarse] * len(LABELS)}, protocol=2)
        with nullcontext() if right else pytest.raises(RunError, match="expected coarse_labels of numbers 0 … 19"):
            cifar_python.read(Path("x"), content, key="fine_labels", classes=100)


@pytest.mark.parametrize("content", [b"N.", b"\x80\2}.", b"", b"hello", b"\x80\2]K\1a."])
def test_what_is_another_pickle_is_told_in_plain_words(content: bytes) -> None:
    with pytest.raises(RunError, match=r"^x is damaged or .*: it is not what the data set's authors wrote$"):
        cifar_python.read(Path("x"), content, key="labels", classes=10)


def test_where_torchvision_puts_mnist(tmp_path: Path) -> None:
    small_files.mnist(tmp_path / "MNIST" / "raw")
    assert len(mnist.load(tmp_path).train.labels) == IMAGES


def test_fashion_mnist_is_not_taken_for_mnist_whose_files_have_the_same_names(tmp_path: Path) -> None:
    small_files.mnist(tmp_path, images=7)
    small_files.fashion_mnist(tmp_path)
    assert len(mnist.load(tmp_path).train.labels) == 7
    assert len(fashion_mnist.load(tmp_path).train.labels) == IMAGES


@given(data=st.data())
def test_damaged_files_are_read_or_named(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes flipped, cut out and put in anywhere: an error that names the file, or images; never anything else."""
    kind = data.draw(st.sampled_from(["binary", "python", "idx", "idx.gz"]))
    pixels, labels = drawn(0, 2, shape=(28, 28)) if kind.startswith("idx") else drawn(0, 2)
    whole = {
        "binary": lambda: binary_content(pixels, labels),
        "python": lambda: published_python_content(pixels, labels),
        "idx": lambda: idx_content(pixels),
        "idx.gz": lambda: write(tmp_path_factory.getbasetemp() / "whole.gz", idx_content(pixels)).read_bytes(),
    }[kind]()
    content = bytearray(whole)
    heads = st.integers(0, 150) | st.integers(0, len(content) - 1) | st.integers(-60, -1)
    for _ in range(data.draw(st.integers(1, 3))):
        at, to = data.draw(heads), data.draw(st.integers(0, 40))
        content[at : at + to] = data.draw(st.binary(min_size=0, max_size=40))
    file = tmp_path_factory.getbasetemp() / f"damaged.{kind}"
    file.write_bytes(content)
    try:
        if kind == "binary":
            cifar_images.read(file, bytes(content), label_bytes=1, classes=10)
        elif kind == "python":
            cifar_python.read(file, bytes(content), key="labels", classes=10)
        else:
            mnist.read_idx(file, dimensions=3)
    except RunError as error:
        said = str(error)
        assert said.startswith(str(file))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("text", [bytes, str])
def test_the_python_version_saved_again(protocol: int, text: type) -> None:
    content = python_content(PIXELS, LABELS, protocol=protocol, text=text)
    read = cifar_python.read(Path("x"), content, key="labels", classes=10)
    assert torch.equal(read.pixels, torch.from_numpy(PIXELS))
    assert read.labels.tolist() == LABELS.tolist()
