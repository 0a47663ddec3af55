"""The sparse allreduces by name, and one of them with a user's settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from communicators import check_settings

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
"""Algorithms by name. A new one is its own file and one line here, from which tests, `auto` and `advise` take it."""

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
    entry = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    entry, encoding = entry or _own(algorithm), wire_named(wire, dtype=dtype)
    if options is not None:
        entry = entry.given(options)
    if size is not None:
        entry.check(size)
    if encoding is RAW:
        return entry
    if not entry.takes_wire:
        raise ValueError(f"{entry.name} sends values as they are, so wire has no effect: leave wire at 'fp32'")
    return entry if size == 1 else replace(entry, wire=encoding)  # alone, nothing travels and nothing is rounded


def _own(algorithm: str | Algorithm) -> Algorithm:
    """The user's own algorithm, which must not have a name that stands for another; errors for any other thing."""
    names = ", ".join([*ALGORITHMS, AUTO])
    if isinstance(algorithm, str):
        raise ValueError(f"unknown algorithm {algorithm!r}; known: {names}; of your own give the Algorithm itself")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        raise TypeError(f"algorithm is the class {algorithm.__name__}, expected one of it, as {algorithm.__name__}()")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm is {algorithm!r}, expected a name: {names}; or an Algorithm of your own")
    if type(algorithm) not in map(type, ALGORITHMS.values()):
        _check_own(algorithm)
    return algorithm


def _check_own(own: Algorithm) -> None:
    """Raises TypeError or ValueError for settings that are no fields, a wrong name or state, or no selection."""
    check_settings(type(own), Algorithm)
    kind, name = type(own).__name__, own.name
    if not isinstance(name, str) or not name or name in ALGORITHMS or name == AUTO:
        taken = ", which is another's" if name in (*ALGORITHMS, AUTO) else ""
        raise ValueError(f"the name of {kind} is {name!r}{taken}, expected text: give it one of its own, name = 'mine'")
    state = own.initial_state()
    if state is not None and (not isinstance(state, dict) or state is own.initial_state()):
        raise TypeError(f"initial_state() of {kind} returns {state!r} at each call, expected a new dict, or None")
    if not own.selects:
        raise ValueError(
            f"{kind} has selects=False, but what sends something of every element is a DenseCompressor for training; a "
            "sum of whole tensors is a collective for communicators.run"
        )
