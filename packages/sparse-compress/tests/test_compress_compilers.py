"""The kernels as every C compiler that is found compiles them, all warnings errors: the bits of the plain references.

gcc, also with its address and undefined sanitizers, clang, gcc with musl, and gcc for 64-bit ARM, which QEMU runs. Each
compiles the kernels and a small driver (kernel_cases.c), without Python, and gets the same inputs, at every level that
the processor has.
"""

import shutil
import struct
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sparse_compress import SparseVector, merge, topk
from sparse_compress.accumulator import Accumulator
from sparse_compress.codecs import elias_fano
from sparse_compress.codecs.rounding import VALUES, leftover
from sparse_compress.native.compiling import FLAGS, SOURCE
from sparse_compress.native.library import LEVELS, using
from sparse_compress.selection import Largest
from sparse_compress.vectors import without
from torch import Tensor

DRIVER = Path(__file__).with_name("kernel_cases.c")
STRICT = ["-Wall", "-Wextra", "-Werror"]
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
SIZES = (1, 31, 1000, 70_001)
SELECT, STEP, MERGE, WITHOUT, PUT, PACK, UNPACK, PACKED_VALUES = range(8)


class Compiler(NamedTuple):
    """What compiles, what runs it where this processor cannot, and the Debian packages of both."""

    command: str
    packages: str
    runner: str = ""
    flags: tuple[str, ...] = ()


COMPILERS = {
    "gcc": Compiler("gcc", "gcc"),
    "gcc, sanitized": Compiler("gcc", "gcc", flags=SANITIZED),
    "clang": Compiler("clang", "clang"),
    "musl": Compiler("musl-gcc", "musl-tools", flags=("-static",)),
    "64-bit ARM": Compiler(
        "aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user", "qemu-aarch64", ("-static",)
    ),
}


@pytest.fixture(scope="module")
def cases():
    with using("plain"):
        return list(every_case())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", COMPILERS)
def test_every_compiler_gives_the_bits_of_the_plain_references(name, cases, tmp_path):
    compiler = COMPILERS[name]
    missing = [tool for tool in (compiler.command, compiler.runner) if tool and shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: apt-get install {compiler.packages}")
    program = tmp_path / "cases"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    words = [compiler.command, *flags, *STRICT, *compiler.flags, f'-DKERNELS="{SOURCE}"', "-o", program, DRIVER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("gcc's sanitizers not found: apt-get install libasan8 libubsan1")
    assert done.returncode == 0, done.stderr
    ran = []
    for level in LEVELS.values():
        used, wrong = _compared([*filter(None, [compiler.runner]), str(program)], level, cases)
        assert wrong == []
        ran += [used] if used == level else []  # else this processor has no such level, and ran a lower one again
    assert ran


class Case(NamedTuple):
    """kernel, numbers: as kernel_cases.c has them. returned: what the kernel must return, None: anything."""

    kernel: int
    numbers: tuple[int, int, int]
    given: list[Tensor]
    expected: list[Tensor]
    returned: int | None = None


def every_case() -> Iterator[Case]:
    """With the answers of the plain references, in which no kernel runs meanwhile."""
    for n, kind in product(SIZES, ("normal", "ties", "denormals", "any bits", "zeros")):
        rng = np.random.default_rng(n)
        x, y, z = (torch.from_numpy(_numbers(rng, kind, n)) for _ in range(3))
        for other in (y, z):  # of two NaNs NumPy keeps the one or the other, depending on the place
            other[~other.isfinite()] = 0
        k = -(-n // 50)
        yield from _selections(x, y, z, k)
        a, b = topk(x, -(-n // 2)), topk(y, -(-n // 3))
        yield from _vectors(a, b, -(-n // 3))
        yield _put(a)
        low, high = elias_fano._bits(n, len(a))
        packed = elias_fano.pack(a.indices, n)
        yield Case(PACK, (len(a), low, high), [a.indices], [packed])
        yield Case(UNPACK, (len(a), low, high), [packed], [a.indices], len(a))
        yield _values(x)


def _selections(x: Tensor, y: Tensor, z: Tensor, k: int) -> Iterator[Case]:
    n, selected = len(x), topk(x, k)
    yield Case(SELECT, (n, k, 0), [x], [selected.indices, selected.values], k)
    kept = Accumulator(y.clone(), z.clone())
    sent = Largest(k).step(kept, x, 0.9, kept)
    if k < n:  # all that accumulated is no selection
        yield Case(STEP, (n, k, 0), [y, z, x], [sent.indices, sent.values, *kept.flat()], k)


def _vectors(a: SparseVector, b: SparseVector, k: int) -> Iterator[Case]:
    given = [a.indices, a.values, b.indices, b.values]
    kept, cut = merge(a, b, k)
    parts = [kept.indices, kept.values, cut.indices, cut.values]
    if len(cut):
        yield Case(MERGE, (len(a), k, len(b)), given, parts, len(kept) + len(cut))
    rest = without(a, b)
    yield Case(WITHOUT, (len(a), 0, len(b)), given, [rest.indices, rest.values], len(rest))


def _put(a: SparseVector) -> Case:
    out = a.put(torch.empty(a.numel), divisor=3)
    return Case(PUT, (a.numel, len(a), 0), [a.indices, a.values], [out])


def _values(x: Tensor) -> Case:
    halves, steps = VALUES["bf16"].pack(x), VALUES["int8"].pack(x)
    wide, power = VALUES["bf16"].unpack(halves, torch.empty_like(x)), int(steps[:4].view(torch.int32))
    expected = [halves, wide, leftover(x, wide, torch.empty_like(x)), steps[8:]]
    expected.append(VALUES["int8"].unpack(steps, torch.empty_like(x)))
    return Case(PACKED_VALUES, (len(x), 0, 0), [x], expected, power)


def _numbers(rng: np.random.Generator, kind: str, n: int) -> NDArray[np.float32]:
    match kind:
        case "normal":
            return rng.standard_normal(n, np.float32)
        case "ties":
            return rng.integers(-3, 4, n).astype(np.float32)
        case "denormals":
            return rng.integers(0, 1 << 20, n).astype(np.int32).view(np.float32)
        case "any bits":
            return rng.integers(-(1 << 31), 1 << 31, n).astype(np.int32).view(np.float32)
    return np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32)


def _compared(command: list[str], level: int, cases: list[Case]) -> tuple[int, list[str]]:
    """The level that ran, and the cases that differ."""
    written, at, used, wrong = memoryview(_answered(command, level, cases)), 0, 0, []
    for number, case in enumerate(cases):
        used, returned = struct.unpack_from("=2q", written, at)
        expected, at = _bytes(case.expected), at + 16
        if written[at : at + len(expected)] != expected or case.returned not in (None, returned):
            wrong.append(f"case {number} at level {used}: kernel {case.kernel}, n, k, m = {case.numbers}")
        at += len(expected)
    return used, wrong


def _answered(command: list[str], level: int, cases: list[Case]) -> bytes:
    """What the driver writes. Raises CalledProcessError where it ends otherwise."""
    said = b"".join(_said(case, level) for case in cases)
    return subprocess.run(command, input=said, capture_output=True, check=True).stdout


def _said(case: Case, level: int) -> bytes:
    given, nbytes = _bytes(case.given), len(_bytes(case.expected))
    return struct.pack("=7q", case.kernel, level, *case.numbers, len(given), nbytes) + given


def _bytes(tensors: list[Tensor]) -> bytes:
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
