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
from sparse_collectives.wire.wire import PLAIN, wire_named

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


def known(algorithm: object) -> Algorithm:
    """The algorithm of that name, or your own.

    Raises ValueError that lists the known names, and for one's own whose name stands for another; TypeError for what is
    neither.
    """
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


def resolve(
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None = None,
    *,
    size: int,
    wire: str = "fp32",
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """The algorithm with its options and wire, for `size` ranks and values of that dtype.

    Raises ValueError that lists the known names or options, and for values that do not fit; TypeError for what is no
    algorithm, and for options of another type than their defaults.
    """
    entry = known(algorithm)
    if options is None and isinstance(wire, str):
        return _usual(entry, wire, size, dtype)
    return _resolved(entry.given(options), wire, size, dtype)


@lru_cache(maxsize=64)
def _usual(entry: Algorithm, wire: str, size: int, dtype: torch.dtype) -> Algorithm:
    """Cached algorithm without options: most calls are like the one before."""
    return _resolved(entry, wire, size, dtype)


def _resolved(entry: Algorithm, wire: str, size: int, dtype: torch.dtype) -> Algorithm:
    way = wire_named(wire, dtype=dtype)
    entry.check(size)
    if way is PLAIN:
        return entry
    check_takes_wire(entry)
    return entry if size == 1 else replace(entry, wire=way)  # alone, nothing travels and nothing is rounded


def check_takes_wire(entry: Algorithm) -> None:
    """Raises ValueError for an algorithm that sends vectors only as they are."""
    if not entry.takes_wire:
        raise ValueError(f"{entry.name} sends values as they are, so wire has no effect: leave wire at 'fp32'")


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
