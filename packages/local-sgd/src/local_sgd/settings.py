"""Checks of a user's settings."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def number(name: str, value: Any) -> float:
    """Finite number; TypeError or ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, expected a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, expected a finite number")
    return float(value)


def positive(name: str, value: Any) -> float:
    """Number above 0."""
    if not number(name, value) > 0:
        raise ValueError(f"{name} is {value}, expected more than 0")
    return float(value)


def below_one(name: str, value: Any) -> float:
    """Number in [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} is {value}, expected 0 ≤ {name} < 1")
    return float(value)


def whole(name: str, value: Any, hint: str = "") -> int:
    """Whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, expected a whole number{hint}")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected 1 or more")
    return value


def policy(name: str, value: Any, *known: str) -> str:
    """Known word; ValueError for any other."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {known}")
    return str(value)


def count(name: str, value: Any) -> int:
    """Whole number from 0 on."""
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
    return value if value == 0 and value is not False and isinstance(value, int) else whole(name, value, ", 0 or more")
