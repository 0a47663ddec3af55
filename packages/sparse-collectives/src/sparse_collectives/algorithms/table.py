"""The sparse allreduces by name. A new one is its own file and one line here; the laws then test it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sparse_compress.arguments import integer

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.dense_sum import dense, dense_reference, dense_sent
from sparse_collectives.algorithms.gtopk import gtopk, gtopk_merged, gtopk_reference, gtopk_sent
from sparse_collectives.algorithms.oktopk import (
    check_oktopk,
    check_oktopk_state,
    oktopk,
    oktopk_reference,
    oktopk_select,
    oktopk_state,
)
from sparse_collectives.algorithms.oktopk_traffic import oktopk_merged, oktopk_sent, oktopk_typical
from sparse_collectives.algorithms.reference import sum_of_selections
from sparse_collectives.algorithms.spardl import check_spardl, check_spardl_state, spardl, spardl_select, spardl_state
from sparse_collectives.algorithms.spardl_reference import spardl_reference
from sparse_collectives.algorithms.spardl_traffic import spardl_merged, spardl_sent, spardl_typical, spardl_variants
from sparse_collectives.algorithms.topk_allgather import topk_allgather, topk_allgather_merged, topk_allgather_sent
from sparse_collectives.algorithms.topk_dsa import topk_dsa, topk_dsa_merged, topk_dsa_sent, topk_dsa_typical
from sparse_collectives.wire.wire import PLAIN, Wire

ALGORITHMS: dict[str, Algorithm] = {
    "dense": Algorithm(dense, dense_sent, compresses=False, reference=dense_reference),
    "topk-allgather": Algorithm(
        topk_allgather, topk_allgather_sent, merged=topk_allgather_merged, reference=sum_of_selections
    ),
    "topk-dsa": Algorithm(
        topk_dsa,
        topk_dsa_sent,
        merged=topk_dsa_merged,
        typical=topk_dsa_typical,
        exact=False,
        reference=sum_of_selections,
    ),
    "gtopk": Algorithm(gtopk, gtopk_sent, merged=gtopk_merged, reference=gtopk_reference),
    "oktopk": Algorithm(
        oktopk,
        oktopk_sent,
        merged=oktopk_merged,
        typical=oktopk_typical,
        select=oktopk_select,
        initial_state=oktopk_state,
        check_state=check_oktopk_state,
        exact=False,
        options={"thresholds_every": 1, "boundaries_every": 64},
        check=check_oktopk,
        reference=oktopk_reference,
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
        reference=spardl_reference,
    ),
}
"""By name. A new one is its own file and one line here; tests, benchmarks, `auto` and `advise` take it from it."""


AUTO = "auto"
"""No algorithm: takes one of them."""


def known(algorithm: object) -> Algorithm:
    """The algorithm of that name, or one's own, with its name set.

    Raises ValueError that lists the known names, and for one's own whose name stands for another; TypeError for what is
    neither.
    """
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; known: {', '.join([*ALGORITHMS, AUTO])}")
        return replace(ALGORITHMS[algorithm], name=algorithm)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm is {algorithm!r}, expected a name: {', '.join([*ALGORITHMS, AUTO])}; "
            "or an Algorithm of your own"
        )
    for name, entry in ALGORITHMS.items():
        if entry is algorithm:
            return replace(entry, name=name)
    _check_own(algorithm)
    return replace(algorithm, name=_own_name(algorithm))


def algorithm_named(
    algorithm: str | Algorithm, options: Mapping[str, Any] | None = None, *, size: int, wire: Wire = PLAIN
) -> Algorithm:
    """The algorithm of that name, or one's own, for `size` ranks, with its name, its options and its wire set.

    Raises ValueError that lists the known names or options, and for values that do not fit; TypeError for what is no
    algorithm, and for options of another type than their defaults.
    """
    entry = known(algorithm)
    check_are_options(options)
    settings = settings_of(entry.name, entry.options, options or {})
    if entry.check is not None:
        entry.check(size, **settings)
    if wire is not PLAIN:
        check_takes_wire(entry)
    sending = settings if wire is PLAIN else {**settings, "wire": wire}
    return replace(
        entry,
        schedule=partial(entry.schedule, **sending),
        sent=partial(entry.sent, **sending),
        typical=None if entry.typical is None else partial(entry.typical, **sending),
        merged=None if entry.merged is None else partial(entry.merged, **settings),
        select=None if entry.select is None else partial(entry.select, **settings),
        reference=None if entry.reference is None else partial(entry.reference, **settings),
        options=settings,
    )


def settings_of(name: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options: those given, in the types of their defaults, else the defaults. ValueError or TypeError."""
    if unknown := [str(key) for key in given if key not in defaults]:
        known = ", ".join(defaults) or "none"
        raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}; it takes: {known}")
    return {key: _like(default, given[key], key) if key in given else default for key, default in defaults.items()}


def check_takes_wire(entry: Algorithm) -> None:
    """Raises ValueError for an algorithm that sends vectors only as they are."""
    if not entry.takes_wire:
        raise ValueError(
            f"{entry.name} sends vectors as they are, because its schedule takes no wire=: leave wire at 'fp32'"
        )


def check_are_options(options: object) -> None:
    """Raises TypeError for what is no dict, nor None."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options is {options!r}, expected a dict of the algorithm's own settings")


def _like(default: Any, value: Any, key: str) -> Any:
    """The value of an option in the type of its default."""
    if isinstance(default, int) and not isinstance(default, bool):
        return integer(value, key, least=None, expected=f"as {default}, the default")
    if isinstance(default, (str, bool)) and not isinstance(value, type(default)):
        raise TypeError(f"{key} is {value!r}, expected a {type(default).__name__}, as {default!r}, the default")
    return value


def _own_name(own: Algorithm) -> str:
    """Raises TypeError or ValueError where there is none, or it is another's."""
    name = own.name or getattr(own.schedule, "__name__", "")
    if not isinstance(name, str):
        raise TypeError(f"an Algorithm's name is {name!r}, expected text")
    if not name or name == "<lambda>":
        raise ValueError(f"the Algorithm of {own.schedule!r} has no name: give it one, Algorithm(..., name='mine')")
    if name in ALGORITHMS or name == AUTO:
        raise ValueError(f"the name of your Algorithm is {name!r}, which is another's: give it one of its own, name=")
    return name


def _check_own(own: Algorithm) -> None:
    """Raises TypeError or ValueError for an Algorithm that cannot be called."""
    for part in ("schedule", "sent"):
        if not callable(getattr(own, part)):
            raise TypeError(f"an Algorithm's {part} is {getattr(own, part)!r}, expected a function")
    if not own.compresses:
        raise ValueError(
            "an Algorithm of your own has compresses=False, but what sends something of every element is a WholeScheme "
            "for training; a sum of whole tensors is a collective for communicators.run"
        )
