"""Cost of exchanges for this rank: bytes handed to the network, and seconds, waited for or hidden."""

from collections.abc import Callable, Sequence
from typing import Any


class Tally:
    """Tally of all exchanges since it was made.

    A step's exchanges are kept one by one until the next step begins, or until all of them are over: later ones do not
    overlap with them.

    waiting_since: time from which this rank does nothing but wait; to be set, and None again from the next exchange on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: list[Any] = []
        self.waiting_since: float | None = None
        self._before = 0, 0.0, 0.0  # bytes sent, seconds under way and seconds waited, without this step's
        self._dense = 0

    def add(self, works: Sequence[Any], *, dense: int) -> None:
        """Adds an exchange, for which dense gradients would take so many bytes.

        The first after a wait belongs to the next step. works: have `began`, `ended` and `bytes_sent`, as a `Work`.
        """
        if self.waiting_since is not None or all(one.ended is not None for one in self._step):
            self._before, self._step, self.waiting_since = self._totals(), [], None
        self._dense += dense
        self._step += works

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
        now, reached = self._clock(), float("-inf")
        since = now if self.waiting_since is None else self.waiting_since
        sent, under_way, waited = self._before
        for work in sorted(self._step, key=lambda work: work.began):
            end = now if work.ended is None else work.ended
            begin = max(work.began, reached)  # what spans cover together is counted once
            under_way += max(0.0, end - begin)
            waited += max(0.0, end - max(begin, since))
            sent, reached = sent + work.bytes_sent, max(reached, end)
        return sent, under_way, waited
