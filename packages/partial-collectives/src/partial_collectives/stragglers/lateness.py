"""Lateness of ranks: arrivals as they are before a barrier hides them."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

from partial_collectives.protocol.events import Header

NOTHING_NEW = (0.0, -1)
MOST_ROUNDS = 4096
"""Most rounds whose lateness is kept; that of older ones is forgotten."""


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
