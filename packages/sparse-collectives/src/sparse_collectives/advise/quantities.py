"""Numbers on the command line: what is taken, and what is said of others."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping

MOST_PARAMETERS = 10**15
MOST_RANKS = 4096
"""Predictions for so many take seconds, and take O(P)."""
SLOWEST_GBIT, FASTEST_GBIT = 1e-6, 1e5
MOST_SECONDS = 60.0
RATES = {"": 1.0, "kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parameters(text: str) -> int:
    """A whole number, such as 25e6."""
    return _count(text, MOST_PARAMETERS)


def ranks(text: str) -> int:
    """A whole number."""
    return _count(text, MOST_RANKS)


def seconds(text: str) -> float:
    """Seconds, more than 0."""
    value = _number(text, "seconds > 0")
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text} given, expected seconds > 0")
    return value


def density(text: str) -> float:
    """Density, more than 0 and at most 1."""
    value = _number(text, "0 < density <= 1")
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text} given, expected 0 < density <= 1")
    return value


def bandwidth(text: str) -> float:
    """Seconds a byte, of a rate such as 1gbit or 200mbit; a number alone is in Gbit/s."""
    gigabits = _with_unit(text.removesuffix("/s"), RATES, "a rate such as 1gbit or 200mbit (a number alone is Gbit/s)")
    if not SLOWEST_GBIT <= gigabits <= FASTEST_GBIT:
        raise ArgumentTypeError(f"{text} is {gigabits:g} Gbit/s, expected 1kbit to 100tbit; a number alone is Gbit/s")
    return 8e-9 / gigabits


def latency(text: str) -> float:
    """Seconds a message, of a time such as 50us or 30ms; a number alone is in seconds."""
    value = _with_unit(text, TIMES, "a time such as 50us or 30ms (a number alone is seconds)")
    if not 0 <= value <= MOST_SECONDS:
        raise ArgumentTypeError(f"{text} is {value:g} s, expected 0 to {MOST_SECONDS:g} s; a number alone is seconds")
    return value


def _count(text: str, most: int) -> int:
    expected = "a whole number of 1 or more"
    value = _number(text, expected)
    if not value >= 1 or (value != math.inf and value != int(value)):
        raise ArgumentTypeError(f"{text} given, expected {expected}")
    if value > most:
        raise ArgumentTypeError(f"{text} given, expected {most:,} at most")
    return int(value)


def _with_unit(text: str, units: Mapping[str, float], expected: str) -> float:
    match = re.fullmatch(r"(.*?)\s*([a-zµ]*)", text.strip().lower())
    if match is None or match[2] not in units or not match[1]:
        raise ArgumentTypeError(f"{text} given, expected {expected}")
    return _number(match[1], expected) * units[match[2]]


def _number(text: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text} given, expected {expected}") from error
