"""Delays for experiments, as the paper injects them: on fixed ranks, on random ones, or more on every rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

FORMS = "'fixed:RANK,…=SECONDS', 'random:COUNT=SECONDS' or 'linear=SECONDS'"


def injected_delays(text: str, rank: int, size: int, *, seed: int = 0) -> Callable[[int], float]:
    """Seconds for which this rank is held up in a step, as a function of the step.

        held_up = injected_delays("random:2=0.32", comm.rank, comm.size)
        time.sleep(held_up(step))  # comm.elapse(…) in a simulated world

    Args:
        text: "fixed:0,3=0.2": these ranks in every step; "random:2=0.32": so many ranks, drawn anew in each step, alike
            on all ranks; "linear=0.001": so much times the rank. "" is no delay. Eager-SGD's evaluation used 0.32 s on
            two random ranks of 64, 0.2 s on two ranks, and 1 ms · rank.
        rank: This rank.
        size: Number of ranks.
        seed: Seed of the draws, alike on all ranks.
    """
    if not text:
        return lambda step: 0.0
    how, _, amount = text.partition("=")
    kind, _, which = how.partition(":")
    try:
        seconds = float(amount)
        ranks = [int(one) for one in which.split(",")] if kind == "fixed" else []
        count = int(which) if kind == "random" else 0
    except ValueError:
        raise ValueError(f"delays are {text!r}, expected {FORMS}") from None
    if kind not in ("fixed", "random", "linear") or not 0 <= seconds < math.inf or not 0 <= count <= size:
        raise ValueError(f"delays are {text!r}, expected {FORMS}, of 0 s or more, and at most {size} ranks")
    if any(not 0 <= one < size for one in ranks):
        raise ValueError(f"delays are {text!r}, but ranks are 0 … {size - 1}")
    if kind == "linear":
        return lambda step: seconds * rank
    if kind == "fixed":
        return lambda step: seconds if rank in ranks else 0.0
    return lambda step: seconds if rank in random.Random(f"delay {seed}/{step}").sample(range(size), count) else 0.0
