"""Rates and delays as people write them: 100mbit, 1gbit, 1ms, 50us."""

from __future__ import annotations

import re

_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def rate(text: str) -> float:
    """Parses a rate into Mbit/s; ValueError for anything but a positive rate."""
    value = _amount(text, _MBIT, "a rate such as 100mbit or 1gbit")
    if value <= 0:
        raise ValueError(f"expected a rate above 0, got {text!r}")
    return value


def delay(text: str) -> float:
    """Parses a delay into milliseconds; ValueError for anything else."""
    return _amount(text, _MILLISECONDS, "a delay such as 1ms or 50us")


def _amount(text: str, units: dict[str, float], expected: str) -> float:
    matched = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]+)", text.strip().lower())
    if matched is None or matched[2] not in units:
        raise ValueError(f"expected {expected} (units: {', '.join(units)}), got {text!r}")
    return float(matched[1]) * units[matched[2]]
