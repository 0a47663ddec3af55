"""Schemes that send something of every element, by name: for training only, since they live by error feedback.

A new one is its own file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from communicators import Communicator
from sparse_compress.arguments import integer

from sparse_collectives.training.exchange import Scheme
from sparse_collectives.training.schemes.dense_int8 import Int8Sum
from sparse_collectives.training.schemes.powersgd import PowerSGD, check_rank


@dataclass(frozen=True, slots=True)
class Whole:
    """make: (comm, **options) -> the scheme. options: whole numbers, with their defaults; check: (**options)."""

    make: Callable[..., Scheme]
    options: Mapping[str, int] = field(default_factory=dict)
    check: Callable[..., None] = lambda: None


WHOLE: dict[str, Whole] = {
    "powersgd": Whole(PowerSGD, options={"rank": 2}, check=check_rank),
    "dense-int8": Whole(Int8Sum),
}


def check_whole(name: str, options: Mapping[str, Any] | None, wire: str, momentum: float, optimizer: str) -> None:
    """What a user set for one of `WHOLE`. Raises TypeError or ValueError; `optimizer`: where momentum belongs."""
    _options(name, options)
    if wire != "fp32":
        raise ValueError(f"{name} has a wire of its own, so wire={wire!r} would have no effect: leave it out")
    if momentum:
        raise ValueError(f"{name} selects nothing, so momentum={momentum} belongs into {optimizer}")


def whole_scheme(name: str, options: Mapping[str, Any] | None, comm: Communicator) -> tuple[Scheme, list[str]]:
    """The scheme, and its options as text, which all ranks must share."""
    settings = _options(name, options)
    return WHOLE[name].make(comm, **settings), [f"{key}={value}" for key, value in settings.items()]


def _options(name: str, given: Mapping[str, Any] | None) -> dict[str, int]:
    defaults = WHOLE[name].options
    if unknown := sorted(str(key) for key in given or {} if key not in defaults):
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it takes: {', '.join(defaults) or 'none'}")
    settings = {
        key: integer({**defaults, **(given or {})}[key], key, least=None, expected=f"as {default}, the default")
        for key, default in defaults.items()
    }
    WHOLE[name].check(**settings)
    return settings
