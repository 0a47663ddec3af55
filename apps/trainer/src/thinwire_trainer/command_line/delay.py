"""--inject-delay, as far as it can be checked without torch; `partial_collectives.injected_delays` takes the same."""

import math
from argparse import ArgumentTypeError

from thinwire_trainer.errors import RunError

NONE = ("none", "")
FORMS = "none, fixed:RANK,…=SECONDS, random:COUNT=SECONDS or linear=SECONDS, of 0 s or more"


def delay(text: str) -> str:
    """A check of the flag's form."""
    try:
        fits = text in NONE or (_seconds_fit(text) and min(_numbers(text), default=0) >= 0)
    except ValueError:
        fits = False
    if not fits:
        raise ArgumentTypeError(f"given {text!r}, expected {FORMS}")
    return text


def require_ranks(text: str, workers: int) -> None:
    """RunError if it speaks of ranks that there are not."""
    for number in _numbers(text):
        if text.startswith("fixed") and number >= workers:
            raise RunError(
                f"--inject-delay {text}: there is no rank {number} of {workers}, which are 0 … {workers - 1}"
            )
        if number > workers:
            raise RunError(f"--inject-delay {text}: {number} ranks are more than the {workers} workers")


def _seconds_fit(text: str) -> bool:
    how, _, amount = text.partition("=")
    seconds = float(amount)
    return how.partition(":")[0] in ("fixed", "random", "linear") and math.isfinite(seconds) and seconds >= 0


def _numbers(text: str) -> list[int]:
    """Of fixed ranks, or how many random ones."""
    kind, _, which = text.partition("=")[0].partition(":")
    if kind == "fixed":
        return [int(rank) for rank in which.split(",")]
    return [int(which)] if kind == "random" else []
