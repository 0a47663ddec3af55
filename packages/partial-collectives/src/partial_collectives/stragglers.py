"""Stragglers: ranks' arrivals as they are before a barrier hides them, deadlines, and delays for experiments."""

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from partial_collectives.protocol.events import Header

NOTHING_NEW = (0.0, -1)
MOST_ROUNDS = 4096
"""Most rounds whose lateness is kept; that of older ones is forgotten."""
FORMS = "'fixed:RANK,…=SECONDS', 'random:COUNT=SECONDS' or 'linear=SECONDS'"
T = TypeVar("T")


class Arrivals:
    """Arrivals of this rank at its rounds, against when they began, by its own clock.

    A rank that comes too late for several rounds is late for the first of them.
    """

    def __init__(self) -> None:
        self._came: float | None = None  # to the round that comes next
        self._missed: tuple[int, float] | None = None  # the round that it has not come to, and when that began
        self._told = NOTHING_NEW

    def arrived(self, seconds: float) -> None:
        """Notes that a gradient was given."""
        if self._missed is not None:
            round_, began = self._missed
            self._told, self._missed = (seconds - began, round_), None
        self._came = seconds

    def began(self, round_: int, seconds: float, *, fresh: bool) -> tuple[float, int]:
        """Notes that this rank enters a round; returns what to tell in it: seconds late, in which round."""
        if fresh and self._came is not None and self._told == NOTHING_NEW:
            self._told = self._came - seconds, round_
        elif not fresh and self._missed is None:
            self._missed = round_, seconds
        told, self._told = self._told, NOTHING_NEW
        self._came = None
        return told


class Lateness:
    """Arrivals of all ranks, as they tell them in the headers of rounds; the same on every rank.

    May be asked in any thread while rounds go on.

    Attributes:
        rounds: For each of the last rounds, as far as it is known: rank -> seconds from its beginning to the rank's
            arrival, below 0 where it was early. A late rank's comes with a later round.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds: dict[int, dict[int, float]] = {}
        self._lock = threading.Lock()

    def record(self, headers: Sequence[Header]) -> None:
        """Records the arrivals that the headers of a round tell."""
        with self._lock:
            for rank, header in enumerate(headers):
                if header.late_round >= 0:
                    self.rounds.setdefault(header.late_round, {})[rank] = header.late
            while len(self.rounds) > MOST_ROUNDS:
                del self.rounds[next(iter(self.rounds))]

    def last(self) -> dict[int, list[float]]:
        """Margins by rank, one for each round in which it was last: seconds against the median of the others."""
        margins: dict[int, list[float]] = {rank: [] for rank in range(self.size)}
        with self._lock:
            rounds = [dict(arrivals) for arrivals in self.rounds.values()]
        for arrivals in rounds:
            if len(arrivals) > 1:
                rank = max(arrivals, key=lambda r: (arrivals[r], -r))
                others = [late for other, late in arrivals.items() if other != rank]
                margins[rank].append(arrivals[rank] - statistics.median(others))
        return margins

    def by_rank(self) -> dict[int, float]:
        """Arrival of each rank in the median of the last rounds: seconds after their beginning, below 0 before it.

        Ranks of which no arrival is known yet are left out.
        """
        with self._lock:
            known = [arrival for arrivals in self.rounds.values() for arrival in arrivals.items()]
        came: dict[int, list[float]] = {}
        for rank, late in known:
            came.setdefault(rank, []).append(late)
        return {rank: statistics.median(came[rank]) for rank in sorted(came)}

    def slowest(self) -> tuple[int, float, float]:
        """Rank that was last most often, its share of the rounds, and by how many seconds in the median.

        (-1, 0, 0) where no round has been measured.
        """
        last = self.last()
        if not any(last.values()):
            return -1, 0.0, 0.0
        rank = max(last, key=lambda r: (len(last[r]), -r))
        return rank, len(last[rank]) / sum(map(len, last.values())), statistics.median(last[rank])

    def summary(self) -> str:
        """The slowest rank in one line, such as "rank 2 was last in 61 % of rounds, by 180 ms in the median"."""
        rank, share, late = self.slowest()
        if rank < 0:
            return "no round has been measured"
        return f"rank {rank} was last in {100 * share:.0f} % of rounds, by {1e3 * late:.0f} ms in the median"


def until_deadline(
    micro_batches: Iterable[T], seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[T]:
    """The micro-batches that begin within `seconds` from the first; at least that one (DropCompute, NeurIPS 2023).

        samples = 0
        for batch in until_deadline(micro_batches, 0.5):
            loss(batch).backward()       # sums over its samples
            samples += len(batch)
        for p in model.parameters():
            p.grad /= samples            # the mean over those that were in time
        optimizer.step(weight=samples)   # of a weighted EagerSGD: what was left out is not counted either

    Args:
        micro_batches: Micro-batches, taken one at a time as they are needed.
        seconds: Time from the first one's beginning.
        clock: `comm.clock` in a simulated world.

    Yields:
        Those that begin in time.
    """
    if not seconds > 0:
        raise ValueError(f"the deadline is {seconds} s, expected more than 0")
    end: float | None = None
    for micro_batch in micro_batches:
        if end is not None and clock() >= end:
            return
        end = clock() + seconds if end is None else end
        yield micro_batch


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
    known = kind in ("fixed", "random") or how == "linear"  # which is of all ranks
    if not known or not 0 <= seconds < math.inf or not 0 <= count <= size:
        raise ValueError(f"delays are {text!r}, expected {FORMS}, of 0 s or more, and at most {size} ranks")
    if any(not 0 <= one < size for one in ranks):
        raise ValueError(f"delays are {text!r}, but ranks are 0 … {size - 1}")
    if kind == "linear":
        return lambda step: seconds * rank
    if kind == "fixed":
        return lambda step: seconds if rank in ranks else 0.0
    return lambda step: seconds if rank in random.Random(f"delay {seed}/{step}").sample(range(size), count) else 0.0
