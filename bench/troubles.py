"""What befalls the ranks of a large cluster, and what that costs: distributions and seconds, the same for all ways."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Troubles:
    """The distributions, in seconds.

    step: of computing, times exp(N(0, jitter²)). hang_share: of the steps that take longer, by an exponential of mean
    `hang`. slow_every, slow_for: means of exponentials, after which a rank computes `slow` times as long, and for how
    long. death_every: mean of an exponential, of each rank; repair: until it, or another in its place, is there again.
    """

    step: float = 5.0
    jitter: float = 0.05
    hang_share: float = 0.02
    hang: float = 2.5
    slow: float = 1.5
    slow_every: float = 100 * 3600.0
    slow_for: float = 3600.0
    death_every: float = 1000 * 3600.0
    repair: float = 900.0


@dataclass(frozen=True)
class Costs:
    """In seconds. round: of a collective. checkpoint: for all ranks to write one. notice: until all know of a death.

    restart: of the whole job, from its last checkpoint on. seldom: between checkpoints that no death goes back to.
    """

    round: float = 0.1
    checkpoint: float = 60.0
    notice: float = 30.0
    restart: float = 600.0
    seldom: float = 3600.0

    def interval(self, cluster_death_every: float) -> float:
        """Between checkpoints that each death goes back to: Young's √(2·C·M)."""
        return math.sqrt(2 * self.checkpoint * cluster_death_every)


@contextmanager
def untold() -> Iterator[None]:
    """Keeps simulated ranks from telling of every change, each of them, inside the block."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def steps_of(
    troubles: Troubles, size: int, draw: np.random.Generator, clock: Callable[[], float]
) -> Callable[[Flags], Times]:
    """What draws the seconds of a step of some ranks, beginning about now."""
    slow = slow_ones(troubles, size, draw)
    return lambda who: step_seconds(troubles, slow(clock())[who], draw)


def slow_ones(troubles: Troubles, size: int, draw: np.random.Generator) -> Callable[[float], Flags]:
    """What tells which ranks are slow at a time; times do not go back."""
    slow_from = draw.exponential(troubles.slow_every, size)
    slow_to = slow_from + draw.exponential(troubles.slow_for, size)

    def slow(now: float) -> Flags:
        over = now >= slow_to
        if over.any():
            slow_from[over] = now + draw.exponential(troubles.slow_every, int(over.sum()))
            slow_to[over] = slow_from[over] + draw.exponential(troubles.slow_for, int(over.sum()))
        are: Flags = (slow_from <= now) & (now < slow_to)
        return are

    return slow


def step_seconds(troubles: Troubles, slow: Flags, draw: np.random.Generator) -> Times:
    """Seconds of one step each of ranks, or of several steps of one. slow: which of them are."""
    step: Times = troubles.step * np.exp(troubles.jitter * draw.standard_normal(len(slow)))
    hangs: Times = (draw.random(len(slow)) < troubles.hang_share) * draw.exponential(troubles.hang, len(slow))
    return step * np.where(slow, troubles.slow, 1.0) + hangs
