"""How calls go: their algorithm with options and wire, and a call's state, checked, or as "auto" has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from communicators import Communicator
from sparse_compress import SparseVector

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.table import ALGORITHMS, AUTO, algorithm_named, check_are_options
from sparse_collectives.prediction.auto import refuse_options, remembered
from sparse_collectives.state import State, check_is_state
from sparse_collectives.wire.wire import PLAIN, wire_named

CHOSEN = {"algorithm", "options", "wire", "state", "table"}
"""What "auto" remembers of a choice."""


class Way(NamedTuple):
    """What does not change from call to call. entry: the algorithm, its options and wire set. settings: as text."""

    entry: Algorithm
    settings: list[str]

    def facts(self, *what: str) -> str:
        """What all ranks must share."""
        return f"{self.entry.name}({', '.join([*what, *self.settings])})"


def way_of(
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None,
    wire: str,
    *,
    size: int,
    dtype: torch.dtype = torch.float32,
) -> Way:
    """For `size` ranks and values of that dtype. Raises TypeError and ValueError for what is wrong."""
    if isinstance(algorithm, str) and options is None and isinstance(wire, str):
        made_of, way = _usual_way(algorithm, wire, size, dtype)
        if made_of is ALGORITHMS.get(algorithm):
            return way
    return _made_way(algorithm, options, wire, size, dtype)


@lru_cache(maxsize=64)
def _usual_way(algorithm: str, wire: str, size: int, dtype: torch.dtype) -> tuple[Algorithm, Way]:
    """With default options: made once, as most calls are like the one before; and the entry that it was made of."""
    way = _made_way(algorithm, None, wire, size, dtype)
    return ALGORITHMS[algorithm], way


def _made_way(
    algorithm: str | Algorithm, options: Mapping[str, Any] | None, wire: str, size: int, dtype: torch.dtype
) -> Way:
    way = wire_named(wire, dtype=dtype)
    way = way if size > 1 else PLAIN  # alone, nothing travels and nothing is rounded
    entry = algorithm_named(algorithm, options, size=size, wire=way)
    if not entry.compresses and wire != "fp32":
        raise ValueError(f"{entry.name} sums all values as they are, but wire={wire!r} was given: leave wire out")
    in_fewer_bytes = [f"wire={wire}"] if way is not PLAIN else []
    return Way(entry, [*entry.settings, *in_fewer_bytes])


def settled(
    like: SparseVector,
    comm: Communicator,
    k: int,
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None,
    state: State | None,
    wire: str,
) -> tuple[Way, dict[str, State]]:
    """The way of one call, and its state as a keyword, where the algorithm has one.

    like: a vector of the numel, dtype and device in question. Raises TypeError and ValueError for what is wrong.
    """
    if isinstance(algorithm, str) and algorithm == AUTO:
        wire_named(wire, dtype=like.dtype)
        check_are_options(options)
        refuse_options(options)
        _check_remembered(state)
        algorithm, options, state, wire = remembered(state, like, comm, k, wire)
    way = way_of(algorithm, options, wire, size=comm.size, dtype=like.dtype)
    return way, _kept(way.entry, state)


def _kept(entry: Algorithm, state: State | None) -> dict[str, State]:
    if entry.initial_state is None:
        if state is not None:
            raise ValueError(f"{entry.name} keeps no state between calls: leave state out")
        return {}
    if state is None:
        return {"state": entry.initial_state()}
    check_is_state(state, entry.name)
    if entry.check_state is not None:
        entry.check_state(state)
    return {"state": state}


def _check_remembered(state: State | None) -> None:
    if state is None:
        return
    check_is_state(state, AUTO)
    for choice in state.values():
        if not isinstance(choice, dict) or set(choice) != CHOSEN or not isinstance(choice["algorithm"], str):
            keys = sorted(map(str, state))
            raise ValueError(f'this is the state of another algorithm than "auto", with the keys {keys}: give {{}}')
