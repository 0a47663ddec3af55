"""The sparse allreduces by name, and one of them with a user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.dense_sum import Dense
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.oktopk import OkTopk
from sparse_collectives.algorithms.spardl import SparDL
from sparse_collectives.algorithms.topk_allgather import TopKAllgather
from sparse_collectives.algorithms.topk_dsa import TopKDSA
from sparse_collectives.wire import RAW, wire_named

ALGORITHMS: dict[str, Algorithm] = {
    "dense": Dense(),
    "topk-allgather": TopKAllgather(),
    "topk-dsa": TopKDSA(),
    "gtopk": GTopK(),
    "oktopk": OkTopk(),
    "spardl": SparDL(),
}
"""By name. A new one is its own file and one line here; tests, benchmarks, `auto` and `advise` take it from it."""

AUTO = "auto"
"""No algorithm: takes one of them."""


def resolve(
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None = None,
    *,
    size: int | None = None,
    wire: str = "fp32",
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """The algorithm of that name, or your own, with its options and wire.

    Args:
        algorithm: A name in `ALGORITHMS`, or an `Algorithm`.
        options: The algorithm's own settings; by default as they are.
        size: Number of ranks that the options must fit; None where it is not known yet.
        wire: A name in `WIRES`.
        dtype: Of the values.

    Raises:
        ValueError: An unknown name, option or wire, or values that do not fit; lists the known ones.
        TypeError: No algorithm, or an option of another type than its default.
    """
    entry = _known(algorithm)
    if options is None and isinstance(wire, str):
        return _usual(entry, size, wire, dtype)
    return _resolved(entry.given(options), size, wire, dtype)


def _resolved(entry: Algorithm, size: int | None, wire: str, dtype: torch.dtype) -> Algorithm:
    encoding = wire_named(wire, dtype=dtype)
    if size is not None:
        entry.check(size)
    if encoding is RAW:
        return entry
    if not entry.takes_wire:
        raise ValueError(f"{entry.name} sends values as they are, so wire has no effect: leave wire at 'fp32'")
    return entry if size == 1 else replace(entry, wire=encoding)  # alone, nothing travels and nothing is rounded


@lru_cache(maxsize=64)
def _usual(entry: Algorithm, size: int | None, wire: str, dtype: torch.dtype) -> Algorithm:
    """Cached algorithm without options: most calls are like the one before."""
    return _resolved(entry, size, wire, dtype)


def _known(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of that name, or the user's own, which must not have a name that stands for another."""
    names = ", ".join([*ALGORITHMS, AUTO])
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; known: {names}")
        return ALGORITHMS[algorithm]
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise TypeError(f"algorithm is the class {algorithm.__name__}, expected one of it, as {algorithm.__name__}()")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm is {algorithm!r}, expected a name: {names}; or an Algorithm of your own")
    if type(algorithm) not in map(type, ALGORITHMS.values()):
        _check_own(algorithm)
    return algorithm


def _check_own(own: Algorithm) -> None:
    """Raises TypeError or ValueError for an Algorithm that cannot be called, or that has no name of its own."""
    kind = type(own).__name__
    for part in ("schedule", "sent"):
        if getattr(type(own), part) is getattr(Algorithm, part):
            raise TypeError(f"{kind} has no {part}: an Algorithm needs schedule and sent")
    if not isinstance(own.name, str):
        raise TypeError(f"the name of {kind} is {own.name!r}, expected text")
    if not own.name:
        raise ValueError(f"{kind} has no name: give it one, name = 'mine'")
    if own.name in ALGORITHMS or own.name == AUTO:
        raise ValueError(f"the name of {kind} is {own.name!r}, which is another's: give it one of its own")
    if not own.selects:
        raise ValueError(
            f"{kind} has selects=False, but what sends something of every element is a DenseCompressor for training; a "
            "sum of whole tensors is a collective for communicators.run"
        )
