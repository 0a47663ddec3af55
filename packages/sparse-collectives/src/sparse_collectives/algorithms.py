"""The sparse allreduces by name. A new one is its own file and one line here; the laws then test it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from communicators.schedule import Schedule
from sparse_compress import SparseVector
from sparse_compress.arguments import integer
from torch import Tensor

from sparse_collectives.dense import dense, dense_sent
from sparse_collectives.gtopk import gtopk, gtopk_merged, gtopk_sent
from sparse_collectives.oktopk import check_oktopk, check_oktopk_state, oktopk, oktopk_select, oktopk_state
from sparse_collectives.oktopk_traffic import oktopk_merged, oktopk_sent, oktopk_typical
from sparse_collectives.reduction import Reduction
from sparse_collectives.spardl import check_spardl, check_spardl_state, spardl, spardl_select, spardl_state
from sparse_collectives.spardl_traffic import spardl_merged, spardl_sent, spardl_typical, spardl_variants
from sparse_collectives.state import State
from sparse_collectives.topk_allgather import topk_allgather, topk_allgather_merged, topk_allgather_sent
from sparse_collectives.topk_dsa import topk_dsa, topk_dsa_merged, topk_dsa_sent, topk_dsa_typical
from sparse_collectives.traffic import Traffic
from sparse_collectives.wire import PLAIN, Wire


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the rest of the package asks of an algorithm.

    schedule: (sparse, rank, size, k, *, cost=None) -> Schedule[Reduction], with sparse of exactly min(k, n) entries;
        one that has `initial_state` takes `state=` too.
    sent: (rank, size, k, numel, dtype) -> Traffic of a call without a state: the exact expression, or, where `exact` is
        False because it depends on what the ranks hold, the most that it can be.
    typical: where that is something else than `sent`, what a call in the midst of training sends if every rank selects
        at random; predictions are based on it.
    merged: (rank, size, k, numel) -> entries that the rank merges, as `schedule` tells its `cost`; typically, where
        that depends on the data.
    select: where the algorithm prescribes what is sent, (like, rank, size, k, state) -> the selection of the next call,
        a function from what has accumulated, 1-D, to a SparseVector; like: a tensor of the gradient's numel and dtype.
        Neither changes the state.
    initial_state: the state before the first call, where there is one.
    check_state: raises ValueError for a dict that is no state of it.
    compresses: whether a gradient is selected from before it is sent, and so leaves a residual. Schedule, sent and
        typical then take `wire=`, how vectors travel, where that is not as they are.
    options: its own settings, with their defaults, whose types they have; schedule, sent and select take them as
        keywords.
    check: (size, **options), raises ValueError for settings that do not fit.
    variants: (size) -> the settings among which predictions look for the best; default: none but the defaults.
    """

    schedule: Callable[..., Schedule[Reduction]]
    sent: Callable[..., Traffic]
    select: Callable[..., Callable[[Tensor], SparseVector]] | None = None
    initial_state: Callable[[], State] | None = None
    check_state: Callable[[State], None] | None = None
    compresses: bool = True
    merged: Callable[..., int] | None = None
    typical: Callable[..., Traffic] | None = None
    exact: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[..., None] | None = None
    variants: Callable[[int], Sequence[Mapping[str, Any]]] = lambda size: [{}]

    @property
    def settings(self) -> list[str]:
        """The options as text, which all ranks must share."""
        return [f"{key}={value}" for key, value in self.options.items()]


ALGORITHMS: dict[str, Algorithm] = {
    "dense": Algorithm(dense, dense_sent, compresses=False),
    "topk-allgather": Algorithm(topk_allgather, topk_allgather_sent, merged=topk_allgather_merged),
    "topk-dsa": Algorithm(topk_dsa, topk_dsa_sent, merged=topk_dsa_merged, typical=topk_dsa_typical, exact=False),
    "gtopk": Algorithm(gtopk, gtopk_sent, merged=gtopk_merged),
    "oktopk": Algorithm(
        oktopk,
        oktopk_sent,
        merged=oktopk_merged,
        typical=oktopk_typical,
        select=oktopk_select,
        initial_state=oktopk_state,
        check_state=check_oktopk_state,
        exact=False,
        options={"thresholds_every": 32, "boundaries_every": 64},
        check=check_oktopk,
    ),
    "spardl": Algorithm(
        spardl,
        spardl_sent,
        merged=spardl_merged,
        typical=spardl_typical,
        select=spardl_select,
        initial_state=spardl_state,
        check_state=check_spardl_state,
        options={"teams": 1, "sag": "auto"},
        check=check_spardl,
        variants=spardl_variants,
    ),
}


def algorithm_named(name: str, options: Mapping[str, Any] | None = None, *, size: int, wire: Wire = PLAIN) -> Algorithm:
    """The algorithm of that name for `size` ranks, with its options and its wire set.

    Raises ValueError that lists the known names or options, and for values that do not fit; TypeError for what is no
    name, and for options of another type than their defaults.
    """
    if not isinstance(name, str):
        raise TypeError(f"algorithm is {name!r}, expected a name: {', '.join(ALGORITHMS)}")
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(ALGORITHMS)}")
    check_are_options(options)
    entry = ALGORITHMS[name]
    settings = _settings(name, entry.options, options or {})
    if entry.check is not None:
        entry.check(size, **settings)
    sending = settings if wire is PLAIN else {**settings, "wire": wire}
    return replace(
        entry,
        schedule=partial(entry.schedule, **sending),
        sent=partial(entry.sent, **sending),
        typical=None if entry.typical is None else partial(entry.typical, **sending),
        merged=None if entry.merged is None else partial(entry.merged, **settings),
        select=None if entry.select is None else partial(entry.select, **settings),
        options=settings,
    )


def check_are_options(options: object) -> None:
    """Raises TypeError for what is no dict, nor None."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options is {options!r}, expected a dict of the algorithm's own settings")


def _settings(name: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := [str(key) for key in given if key not in defaults]:
        known = ", ".join(defaults) or "none"
        raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}; it takes: {known}")
    return {key: _like(default, given[key], key) if key in given else default for key, default in defaults.items()}


def _like(default: Any, value: Any, key: str) -> Any:
    """The value of an option in the type of its default."""
    if isinstance(default, int) and not isinstance(default, bool):
        return integer(value, key, least=None, expected=f"as {default}, the default")
    if isinstance(default, (str, bool)) and not isinstance(value, type(default)):
        raise TypeError(f"{key} is {value!r}, expected a {type(default).__name__}, as {default!r}, the default")
    return value
