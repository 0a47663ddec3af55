"""The types of flag values: each turns a text into a number or says what would have been right."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

NO_DELAY = "none"


def number(expected: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """A parser of finite real numbers for which `accepts` holds; `expected` describes them."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accepts(value)):
            raise ArgumentTypeError(f"given {text!r}, expected {expected}")
        return value

    return parse


def whole(expected: str, *, least: int, most: float = math.inf) -> Callable[[str], int]:
    """A parser of integers least ≤ n ≤ most; `expected` describes them."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ArgumentTypeError(f"given {text!r}, expected {expected}")
        return value

    return parse


def or_auto(parse: Callable[[str], float]) -> Callable[[str], float | str]:
    """A parser that also takes "auto"."""
    return lambda text: text if text == "auto" else parse(text)


def steps_or_stages(text: str) -> str:
    """A number of steps, or dgc: and one: as it was given."""
    count_or_zero(text.removeprefix("dgc:"))
    return text


density = number("0 < density <= 1, for example 0.01 to send one entry in a hundred", lambda value: 0 < value <= 1)
momentum = number("0 <= momentum < 1", lambda value: 0 <= value < 1)
smoothing = number("0 <= smoothing < 1", lambda value: 0 <= value < 1)
dropout = number("0 <= dropout < 1", lambda value: 0 <= value < 1)
positive = number("a number above 0", lambda value: value > 0)
non_negative_or_auto = or_auto(number("a number from 0 on, or auto", lambda value: value >= 0))
momentum_or_auto = or_auto(number("0 <= momentum < 1, or auto", lambda value: 0 <= value < 1))
non_negative = number("a number from 0 on", lambda value: value >= 0)
count = whole("a whole number from 1 on", least=1)
count_or_zero = whole("a whole number from 0 on", least=0)
seed = whole("a whole number from 0 to 2**64 - 1, as torch's generators take", least=0, most=2**64 - 1)
