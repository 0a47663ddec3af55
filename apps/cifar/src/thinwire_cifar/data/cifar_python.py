"""CIFAR's Python version: a file is a pickled dictionary with an array `data` uint8 [n, 3072] and a list of labels.

A pickle is a program. What runs it here knows dictionaries, lists, texts, numbers and how NumPy rebuilds an array of
bytes, and for that it has classes of its own: no name in the file is looked up anywhere, so nothing foreign can run.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from thinwire_trainer.errors import RunError

from thinwire_cifar.data.cifar_images import COARSE, PIXELS_NBYTES, SIZE
from thinwire_cifar.data.images import Loaded


class _RefusedError(Exception):
    """The file asks for something else than arrays of bytes."""


class _Sealed:
    """An object that the program can make and put aside, and neither change nor read."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise _RefusedError("it changes what is not its own")


class _Type(_Sealed):
    """Stands for `numpy.dtype`; of bytes only."""

    def __init__(self, name: Any = None, *more: object) -> None:
        if name not in ("u1", b"u1", "|u1"):
            shown = f"{name!r:.40}" if isinstance(name, str | bytes) else type(name).__name__
            raise _RefusedError(f"it holds an array of another type than bytes ({shown})")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: of no meaning for bytes."""


class _Array:
    """Stands for `numpy.ndarray` and what rebuilds one; filled by its state (version, shape, type, order, bytes)."""

    __slots__ = ("values",)

    def __init__(self, *empty: object) -> None:
        self.values = np.empty((0, 0), np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, content = state
        self.fill(shape, kind, content, order="F" if columns_first else "C")

    def fill(self, shape: Any, kind: Any, content: Any, *, order: Literal["C", "F"]) -> None:
        """Fill the array with bytes that fit; _RefusedError for others."""
        whole = type(shape) is tuple and all(type(n) is int and 0 <= n <= len(content) for n in shape)
        plain = type(kind) is _Type and type(content) in (bytes, bytearray)
        if not whole or not plain or math.prod(shape) != len(content):
            raise _RefusedError("it holds an array whose shape and bytes do not fit")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order=order)


class _FromBuffer(_Sealed):
    """Stands for `numpy._core.numeric._frombuffer`, which rebuilds an array from protocol 5 on."""

    def __new__(cls, content: Any, kind: Any, shape: Any, order: Any) -> Any:
        array = _Array()
        array.fill(shape, kind, content, order="F" if order == "F" else "C")
        return array


class _Latin(_Sealed):
    """Stands for `_codecs.encode`, by which Python 3 writes bytes in old protocols."""

    def __new__(cls, text: Any, encoding: Any) -> Any:
        if type(text) is not str or encoding != "latin1":
            raise _RefusedError("it encodes a text in another way than bytes are written")
        return text.encode("latin1")


ADMITTED: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer,
    ("numpy._core.numeric", "_frombuffer"): _FromBuffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Latin,
}


class _Unpickler(pickle._Unpickler):
    """The one in Python, whose memory is bounded by the file: a few bytes make the one in C reserve gigabytes."""

    def find_class(self, module: str, name: str) -> type:
        """The stand-in; nothing is imported."""
        if (module, name) not in ADMITTED:
            raise _RefusedError(
                f"it asks for {module}.{name}, which was not run; expected arrays, lists and numbers only"
            )
        return ADMITTED[module, name]


def read(path: Path, content: bytes, *, key: str, classes: int) -> Loaded:
    """The images of one file, by the labels under `key`; RunError if it is not of this format, or holds more."""
    try:
        table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        named = {name.decode("latin1") if isinstance(name, bytes) else name: value for name, value in table.items()}
        pixels, labels = named["data"].values, named[key]
        fits = pixels.shape == (len(labels), PIXELS_NBYTES) and len(labels) > 0
        if not fits or type(labels) is not list or not all(type(n) is int and 0 <= n < classes for n in labels):
            raise _RefusedError(
                f"expected data of n × {PIXELS_NBYTES:,} bytes and {key} of n numbers 0 … {classes - 1}"
            )
        if key == "fine_labels" and any(not 0 <= n < COARSE for n in named.get("coarse_labels", ())):
            raise _RefusedError(f"expected coarse_labels of numbers 0 … {COARSE - 1}")
    except Exception as error:  # a damaged program fails anywhere
        raise RunError(f"{path} is damaged or not of the Python version of CIFAR: {_told(error)}") from None
    return Loaded(
        pixels=torch.from_numpy(pixels.reshape(-1, 3, SIZE, SIZE).copy()),
        labels=torch.tensor(labels, dtype=torch.int64),
    )


def _told(error: Exception) -> str:
    return f"{error}"[:200] if isinstance(error, _RefusedError) else "it is not what the data set's authors wrote"
