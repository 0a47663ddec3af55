"""Inputs that have broken selections before, for every test of the package."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from sparse_compress.native.library import LEVELS, kernels, using

Inputs = Callable[[np.random.Generator, int], NDArray[np.float32]]


def _with(x: NDArray[np.float32], where: NDArray[np.bool_], value: float) -> NDArray[np.float32]:
    x[where] = value
    return x


def _on_stride(rng: np.random.Generator, n: int, *, large_on_stride: bool) -> NDArray[np.float32]:
    """Large elements exactly where a sample with the strides in question looks, or exactly where it does not."""
    on_stride = np.zeros(n, bool)
    for size in (2048, 4096, max(n // 256, 1), 32768):
        on_stride[:: n // size | 1] = True
    return np.where(on_stride == large_on_stride, 1, 1e-6).astype(np.float32) * rng.random(n, np.float32)


NASTY: dict[str, Inputs] = {
    "normal": lambda rng, n: rng.standard_normal(n, np.float32),
    "heavy tails": lambda rng, n: rng.standard_cauchy(n).astype(np.float32),
    "7 values": lambda rng, n: rng.integers(-3, 4, n).astype(np.float32),
    "zeros": lambda rng, n: np.zeros(n, np.float32),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32),
    "constant": lambda rng, n: np.full(n, -2.5, np.float32),
    "mostly zero": lambda rng, n: np.where(rng.random(n) < 0.01, 1, 0).astype(np.float32) * rng.random(n, np.float32),
    "ascending": lambda rng, n: np.arange(n, dtype=np.float32),
    "descending": lambda rng, n: np.arange(n, 0, -1, dtype=np.float32),
    "denormals": lambda rng, n: rng.integers(0, 1 << 20, n).astype(np.int32).view(np.float32),
    "spikes": lambda rng, n: _with(rng.standard_normal(n, np.float32), rng.random(n) < 5 / n, 3e38),
    "inf": lambda rng, n: _with(rng.standard_normal(n, np.float32), rng.random(n) < 0.1, -np.inf),
    "any bits": lambda rng, n: rng.integers(-(1 << 31), 1 << 31, n).astype(np.int32).view(np.float32),
    "large on stride": lambda rng, n: _on_stride(rng, n, large_on_stride=True),
    "large off stride": lambda rng, n: _on_stride(rng, n, large_on_stride=False),
    "front": lambda rng, n: np.linspace(1, 0, n, dtype=np.float32) ** 64,
}


@pytest.fixture(params=NASTY, scope="session")
def nasty(request: pytest.FixtureRequest) -> Inputs:
    """(generator, n) -> float32 array of n elements."""
    return NASTY[request.param]


@pytest.fixture(scope="session")
def all_nasty() -> dict[str, Inputs]:
    """All of them by name."""
    return NASTY


@pytest.fixture(params=LEVELS, scope="session")
def level(request: pytest.FixtureRequest) -> str:
    """A level of the compiled kernels that runs here."""
    with using(request.param) as available:
        if not available:
            pytest.skip(f"no kernels for {request.param} here: there is no compiled file, or the processor lacks it")
    return str(request.param)


@pytest.fixture(params=["plain", "compiled"], scope="session")
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once in NumPy, once by the compiled kernels."""
    with using("plain" if request.param == "plain" else "avx512"):
        if request.param == "compiled" and kernels() is None:
            pytest.skip("there is no compiled file: python -m sparse_compress says why")
        yield


@pytest.fixture
def plain() -> Iterator[None]:
    """In NumPy, for tests of what the kernels have no part in."""
    with using("plain"):
        yield
