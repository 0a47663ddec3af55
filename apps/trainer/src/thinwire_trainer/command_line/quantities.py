"""The types of flag values: each turns a text into a number or says what would have been right."""

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

NO_DELAY = "none"


def number(expected: str, accepts: Callable[[float], bool], kind: type[float] = float) -> Callable[[str], Any]:
    """A parser of finite numbers of this kind for which `accepts` holds; `expected` describes them."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (accepts(value) and value < math.inf):
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


def delays(text: str) -> str:
    """Delays, as they were given."""
    if text != NO_DELAY and not re.fullmatch(r"(fixed:\d+(,\d+)*|random:\d+|linear)=[\d.e+-]+", text):
        expected = "fixed:RANK,...=SECONDS, random:COUNT=SECONDS, linear=SECONDS or none"
        raise ArgumentTypeError(f"given {text!r}, expected {expected}")
    if text != NO_DELAY:
        non_negative(text.partition("=")[2])
    return text


def metrics_place(text: str) -> str:
    """Place of metrics, as it was given."""
    kind, colon, place = text.partition(":")
    port = kind == "prometheus" and (not colon or (place.isdecimal() and 0 < int(place) < 1 << 16))
    url = kind == "otlp" and (not colon or place.startswith(("http://", "https://")))
    if not (port or url or text == "file"):
        raise ArgumentTypeError(f"given {text!r}, expected prometheus, prometheus:PORT, otlp, otlp:URL or file")
    return text


density = number("0 < density <= 1, for example 0.01 to send one entry in a hundred", lambda value: 0 < value <= 1)
momentum = number("0 <= momentum < 1", lambda value: 0 <= value < 1)
smoothing = number("0 <= smoothing < 1", lambda value: 0 <= value < 1)
dropout = number("0 <= dropout < 1", lambda value: 0 <= value < 1)
positive = number("a number above 0", lambda value: value > 0)
non_negative_or_auto = or_auto(number("a number from 0 on, or auto", lambda value: value >= 0))
momentum_or_auto = or_auto(number("0 <= momentum < 1, or auto", lambda value: 0 <= value < 1))
non_negative = number("a number from 0 on", lambda value: value >= 0)
count = number("a whole number from 1 on", lambda value: value >= 1, int)
chunk = number("a whole number from 1 to 181", lambda value: 1 <= value <= 181, int)
count_or_zero = number("a whole number from 0 on", lambda value: value >= 0, int)
seed = number("a whole number from 0 to 2**64 - 1, as torch's generators take", lambda value: 0 <= value < 2**64, int)
