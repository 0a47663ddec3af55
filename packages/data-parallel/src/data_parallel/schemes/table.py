"""Schemes that send something of every element, by name: for training only, since they live by error feedback.

A new one is its own file and one line here; one's own stands where a name does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from communicators import Communicator
from sparse_collectives import ALGORITHMS, check_options

from data_parallel.exchange import Scheme
from data_parallel.schemes.dense_int8 import Int8Sum
from data_parallel.schemes.powersgd import DENSE_STEPS, PowerSGD, check_powersgd


@dataclass(frozen=True, slots=True)
class WholeScheme:
    """Entry of a dense scheme, built in or your own (see CONTRIBUTING).

    Attributes:
        make: (comm, **options) -> a new `Scheme` for the gradients of these ranks.
        options: Its own settings with their defaults, which also fix their types.
        check: (**options); raises a ValueError for settings that do not fit.
        name: Name in errors and checkpoints; default: the key in `WHOLE`, else the name of `make`.
    """

    make: Callable[..., Scheme]
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[..., None] | None = None
    name: str = ""


WHOLE: dict[str, WholeScheme] = {
    "powersgd": WholeScheme(PowerSGD, options={"rank": 2, "dense_steps": DENSE_STEPS}, check=check_powersgd),
    "dense-int8": WholeScheme(Int8Sum),
}


def known_whole(algorithm: object) -> WholeScheme | None:
    """The scheme of that name, or your own, with its name set; None for anything else.

    Raises TypeError or ValueError for one of your own that has no name, a name in use, or no callable `make`.
    """
    if isinstance(algorithm, str):
        return replace(WHOLE[algorithm], name=algorithm) if algorithm in WHOLE else None
    if not isinstance(algorithm, WholeScheme):
        return None
    for name, entry in WHOLE.items():
        if entry is algorithm:
            return replace(entry, name=name)
    if not callable(algorithm.make):
        raise TypeError(f"a WholeScheme's make is {algorithm.make!r}, expected a function or class")
    name = algorithm.name or getattr(algorithm.make, "__name__", "")
    if not isinstance(name, str):
        raise TypeError(f"a WholeScheme's name is {name!r}, expected text")
    if not name or name == "<lambda>":
        raise ValueError(
            f"the WholeScheme of {algorithm.make!r} has no name: give it one, WholeScheme(..., name='mine')"
        )
    if name in ALGORITHMS or name in WHOLE or name == "auto":
        raise ValueError(f"the name of your WholeScheme is {name!r}, which is another's: give it one of its own, name=")
    return replace(algorithm, name=name)


def check_whole(
    entry: WholeScheme, options: Mapping[str, Any] | None, wire: str, momentum: float, optimizer: str
) -> None:
    """Checks a user's settings for one. Raises TypeError or ValueError; optimizer: the place where momentum belongs."""
    name = entry.name
    _options(entry, options)
    if wire != "fp32":
        raise ValueError(f"{name} has a wire of its own, so wire={wire!r} would have no effect: leave it out")
    if momentum:
        raise ValueError(f"{name} selects nothing, so momentum={momentum} belongs into {optimizer}")


def whole_scheme(entry: WholeScheme, options: Mapping[str, Any] | None, comm: Communicator) -> tuple[Scheme, list[str]]:
    """The scheme, and its options as text, which all ranks must share."""
    settings = _options(entry, options)
    return entry.make(comm, **settings), [f"{key}={value}" for key, value in settings.items()]


def _options(entry: WholeScheme, given: Mapping[str, Any] | None) -> dict[str, Any]:
    settings = check_options(entry.name, entry.options, given or {})
    if entry.check is not None:
        entry.check(**settings)
    return settings
