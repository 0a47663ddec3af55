"""The data sets in small: files in the exact formats, with few random images."""

import gzip
import pickle
import pickletools
import struct
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = 6  # in each file


def drawn(seed: int, images: int = IMAGES, *, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10):
    """Pixels uint8 [images, *shape] and labels uint8 [images]."""
    numbers = np.random.default_rng(seed)
    pixels = numbers.integers(0, 256, (images, *shape), dtype=np.uint8)
    return pixels, numbers.integers(0, classes, images, dtype=np.uint8)


def binary_content(pixels, labels, *, coarse: bool = False) -> bytes:
    front = b"\7" if coarse else b""
    return b"".join(front + bytes([n]) + image.tobytes() for n, image in zip(labels, pixels, strict=True))


def python_content(pixels, labels, *, key: str = "labels", protocol: int = 2, text: type = bytes) -> bytes:
    """As the published files (written by Python 2, protocol 2, names as bytes), or saved again by Python 3."""
    names = [f"image_{n}.png" for n in range(len(labels))]
    table = {"batch_label": "batch 1 of 1", key: [int(n) for n in labels], "data": pixels.reshape(len(pixels), -1)}
    table["filenames"] = names
    if text is bytes:
        table = {name.encode(): value for name, value in table.items()}
    return pickle.dumps(table, protocol=protocol)


def published_python_content(pixels, labels, *, key: str = "labels") -> bytes:
    """Opcode for opcode what Python 2 wrote: byte strings for all texts, the array rebuilt by NumPy's old name."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    flat = pixels.reshape(len(pixels), -1)
    data = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85" + text(b"b") + b"tR(K\1"
        + b"M" + struct.pack("<H", flat.shape[0]) + b"M" + struct.pack("<H", flat.shape[1]) + b"\x86"
        + b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\1\x87R(K\3" + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        + b"\x89" + b"T" + struct.pack("<i", flat.nbytes) + flat.tobytes() + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    content = b"\x80\2}(" + text(b"data") + data + text(key.encode()) + numbers + b"u."
    list(pickletools.genops(content))
    return content


def idx_content(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def cifar10_binary(data_dir: Path, images: int = IMAGES) -> Path:
    folder = data_dir / "cifar-10-batches-bin"
    for seed, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        write(folder / name, binary_content(*drawn(seed, images)))
    return folder


def cifar10_python(data_dir: Path, images: int = IMAGES) -> Path:
    folder = data_dir / "cifar-10-batches-py"
    for seed, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        write(folder / name, published_python_content(*drawn(seed, images)))
    return folder


def cifar100_binary(data_dir: Path, images: int = IMAGES) -> Path:
    folder = data_dir / "cifar-100-binary"
    for seed, name in enumerate(["train.bin", "test.bin"]):
        write(folder / name, binary_content(*drawn(seed, images, classes=100), coarse=True))
    return folder


def cifar100_python(data_dir: Path, images: int = IMAGES) -> Path:
    folder = data_dir / "cifar-100-python"
    for seed, name in enumerate(["train", "test"]):
        write(folder / name, published_python_content(*drawn(seed, images, classes=100), key="fine_labels"))
    return folder


def mnist(data_dir: Path, images: int = IMAGES, suffix: str = "") -> Path:
    for seed, split in enumerate(["train", "t10k"]):
        pixels, labels = drawn(seed, images, shape=(28, 28))
        write(data_dir / f"{split}-images-idx3-ubyte{suffix}", idx_content(pixels))
        write(data_dir / f"{split}-labels-idx1-ubyte{suffix}", idx_content(labels))
    return data_dir


def mnist_compressed(data_dir: Path, images: int = IMAGES) -> Path:
    return mnist(data_dir, images, ".gz")


def fashion_mnist(data_dir: Path, images: int = IMAGES) -> Path:
    """As Debian's package has it."""
    return mnist(data_dir / "fashion-mnist", images, ".gz")


def imagenet(data_dir: Path, images: int = IMAGES, classes: int = 2) -> Path:
    """`images` of each split, over the classes in turn, of unlike sizes."""
    root = data_dir / "imagenet"
    for seed, split in enumerate(["train", "val"]):
        for number in range(images):
            folder = root / split / f"n{number % classes:08}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([seed, number]).integers(0, 256, (60 + number, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.JPEG")
    return root
