"""Cost of exchanges for this rank: bytes handed to the network, and seconds, waited for or hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from communicators import Work


class Tally:
    """Tally of all exchanges since it was made.

    A step's exchanges are kept one by one until the next step begins, or until all of them are over: later ones do not
    overlap with them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: list[Work[Any]] = []
        self._waiting_since: float | None = None  # since then this rank has had nothing else to do
        self._sent, self._dense, self._under_way, self._waited = 0, 0, 0.0, 0.0

    def add(self, work: Work[Any], *, dense: int) -> None:
        """Adds an exchange, for which dense gradients would take so many bytes.

        The first after a wait belongs to the next step.
        """
        if self._waiting_since is not None or all(one.ended is not None for one in self._step):
            self._sent, self._under_way, self._waited = self._totals()
            self._step, self._waiting_since = [], None
        self._dense += dense
        self._step.append(work)

    def begin_waiting(self) -> None:
        """Notes that this rank does nothing but wait from now on."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def numbers(self) -> dict[str, float]:
        """Bytes and seconds so far, by the names of `communicators.stats.Stats`."""
        sent, under_way, waited = self._totals()
        return {
            "bytes_sent": sent,
            "bytes_dense": self._dense,
            "seconds_exchanging": under_way,
            "seconds_waited": waited,
            "seconds_hidden": under_way - waited,
        }

    def _totals(self) -> tuple[int, float, float]:
        """Bytes, seconds with an exchange under way, and those of them in which this rank waited, with this step's."""
        now = self._clock()
        spans = [(work.began, now if work.ended is None else work.ended) for work in self._step]
        since = now if self._waiting_since is None else self._waiting_since
        waited = covered((max(begin, since), end) for begin, end in spans)
        sent = sum(work.bytes_sent for work in self._step)
        return self._sent + sent, self._under_way + covered(spans), self._waited + waited


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together; those that end before they begin cover nothing."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
