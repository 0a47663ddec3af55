"""Compiled file of the kernels, found and loaded at its first use.

$SPARSE_COMPRESS_NATIVE chooses: 0 for NumPy; c, avx2 or avx512 for the highest level that the kernels may use; or the
path of a file that was compiled otherwise.
"""

import ctypes
import os
import struct
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_compress.native.compiling import COMPILED, SOURCE, SWITCH, digest

FLOATS = (torch.float32,)
SLACK = 64  # entries that a kernel may write beyond the last one
PIECES, PER_ENTRY = 128 + 12 * SLACK, 12  # bytes of scratch memory where a kernel leaves entries in pieces
KEPT = 1 << 26  # bytes that a thread keeps: the first touch of fresh memory costs more than its use
LEVELS = {"c": 0, "avx2": 1, "avx512": 2}
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sc_source": (c_char_p, []),
    "sc_use": (c_int, [c_int]),
    "sc_scratch": (c_int64, [c_int64, c_int64]),
    "sc_select": (c_int64, [c_void_p, *[c_int64] * 4, c_void_p, c_void_p, c_void_p]),
    "sc_step": (
        c_int64,
        [c_void_p, c_void_p, c_void_p, c_int, c_float, c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 3],
    ),
    "sc_union": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p]),
    "sc_without": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "sc_join": (None, [c_void_p] * 3),
    "sc_split": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, *[c_void_p] * 4]),
    "sc_filter": (c_int64, [c_void_p, c_void_p, c_int64, c_int, c_int64, *[c_void_p] * 3]),
    "sc_sorted": (c_int64, [c_void_p, c_int64, c_uint32, c_void_p, c_void_p]),
    "sc_bracket": (None, [c_void_p, *[c_int64] * 3, c_void_p, c_void_p]),
    "sc_say": (None, [c_void_p, *[c_int64] * 5, c_void_p]),
    "sc_settle": (c_int64, [c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 3]),
    "sc_increasing": (c_int, [c_void_p, *[c_int64] * 3]),
    "sc_every": (None, [c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_void_p]),
    "sc_put": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_float]),
    "sc_finite": (c_int, [c_void_p, c_int64]),
    "sc_to_bf16": (None, [c_void_p, c_int64, c_void_p]),
    "sc_of_bf16": (None, [c_void_p, c_int64, c_void_p]),
    "sc_to_int8": (c_int, [c_void_p, c_int64, c_void_p]),
    "sc_of_int8": (None, [c_void_p, c_int64, c_int, c_void_p]),
    "sc_leftover": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "sc_pack_indices": (None, [c_void_p, c_int64, c_int, c_int64, c_void_p]),
    "sc_unpack_indices": (c_int64, [c_void_p, c_int64, c_int, c_int64, c_void_p]),
    "sc_add_at": (None, [c_void_p, c_void_p, c_void_p, c_int64]),
    "sc_take_out": (None, [*[c_void_p] * 4, c_int64]),
}


class Found(NamedTuple):
    """Library, or None; and words that say which kernels are in use, or why none are."""

    library: Any
    words: str


_chosen: list[Found] = []  # of `using`, the last one counts


def kernels(x: Any = None, dtypes: Collection[torch.dtype] = FLOATS) -> Any:
    """Library with typed functions, which release the GIL; None without kernels.

    x: a tensor or sparse vector; None too where the kernels do not take it: contiguous, on a CPU, of these dtypes.
    """
    if x is None or (x.is_cpu and x.dtype in dtypes and (not isinstance(x, Tensor) or x.is_contiguous())):
        return (_chosen[-1] if _chosen else _found()).library
    return None


def in_use() -> str:
    """Description of the kernels in use, or of the reason for NumPy."""
    return (_chosen[-1] if _chosen else _found()).words


@contextmanager
def using(level: str) -> Iterator[bool]:
    """Uses "plain" NumPy, or kernels of one level ("c", "avx2", "avx512"), in all threads inside the block: for tests.

    Yields whether this machine has that level; without it, the best below it runs. Where $SPARSE_COMPRESS_NATIVE is 0
    there is none.
    """
    path, most = _setting()
    found = Found(None, "NumPy, as chosen") if level == "plain" or path is None else _opened(path, level)
    _chosen.append(found)
    try:
        yield level == "plain" or found.words.startswith(f"kernels for {level}:")
    finally:
        _chosen.pop()
        if not _chosen and (before := _found().library):
            before.sc_use(LEVELS[most])


def _setting() -> tuple[Path | None, str]:
    """Compiled file that $SPARSE_COMPRESS_NATIVE chooses, None for NumPy; and the highest level to use."""
    setting = os.environ.get(SWITCH, "")
    if setting == "0":
        return None, "c"
    return (COMPILED, setting or "avx512") if setting in ("", *LEVELS) else (Path(setting), "avx512")


@cache
def _found() -> Found:
    path, level = _setting()
    if path is None:
        return Found(None, f"NumPy: {SWITCH}=0 is set")
    if path != COMPILED and not path.is_file():
        words = f"NumPy: {SWITCH}={str(path)!r} is neither 0, one of {list(LEVELS)} nor a compiled file"
        warnings.warn(f"sparse-compress uses {words}", RuntimeWarning, stacklevel=3)
        return Found(None, words)
    return _opened(path, level)


def _opened(path: Path, level: str) -> Found:
    if not path.exists():
        return Found(None, "NumPy: installed without a compiled file")
    if not _whole(path):
        return Found(None, f"NumPy: {path.name} is cut off: install again")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return Found(None, f"NumPy: {path.name} cannot be loaded: {error}")
    if SOURCE.exists() and library.sc_source() != digest().encode():
        return Found(None, f"NumPy: {path.name} is of another {SOURCE.name}: install again")
    return Found(library, f"kernels for {list(LEVELS)[library.sc_use(LEVELS[level])]}: {path}")


def _whole(path: Path) -> bool:
    """Whether an ELF file is as long as its header says; a process that loads one cut short is killed by SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02\x01"):  # 64 bits, little-endian
        return True  # the loader says what it thinks of it
    sections, width, count = struct.unpack_from("<Q10xHH", header, 0x28)
    return bool(path.stat().st_size >= sections + width * count)


class Scratch(threading.local):
    """Scratch memory of one thread, which keeps up to KEPT bytes."""

    memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, nbytes: int) -> Tensor:
        """Memory of ``nbytes`` bytes or more, valid while they are held and until this thread asks again."""
        if nbytes > self.memory.numel():
            fresh = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes > KEPT:
                return fresh
            self.memory = fresh
        return self.memory


SCRATCH = Scratch()
