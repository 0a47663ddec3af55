"""State that an algorithm keeps between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

State: TypeAlias = dict[str, Any]
"""Plain values, lists and tensors; changed in place, and only when a collective has succeeded.

One state serves one call at a time: the next call begins when the last has ended.
"""


def check_is_state(state: object, algorithm: str) -> None:
    """Raises TypeError unless the state is a dict."""
    if not isinstance(state, dict):
        raise TypeError(
            f"state is {type(state).__name__}, expected a dict that all such calls of {algorithm} share: at first what "
            "the initial_state() of that Algorithm gives, {} for 'auto'"
        )


def check_values(state: State, fits: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raises ValueError for a state of other keys than `fits`, or with a value that does not fit."""
    if set(state) != set(fits):
        raise ValueError(
            f"the state has the keys {sorted(map(str, state))}, expected {sorted(fits)}: it is another algorithm's, or "
            "another version's; begin with the initial_state() of this one"
        )
    for key, fit in fits.items():
        if not fit(state[key]):
            raise ValueError(f"the state's {key} is {state[key]!r}, which no call leaves behind: it was damaged")


def is_count(value: Any) -> bool:
    """An integer from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
