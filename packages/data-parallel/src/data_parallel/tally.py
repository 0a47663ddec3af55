"""Cost of exchanges for this rank: bytes handed to the network, and seconds, waited for or hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


class Timed(Protocol):
    """When something was under way, in seconds by the communicator's clock; `ended` is None while it is."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float | None: ...


@dataclass(eq=False)
class Exchanged:
    """One bucket's exchange. sent: bytes besides those of its work."""

    sent: int = 0
    work: Timed | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or failed before it was under way."""
        return self.work is None or self.work.ended is not None

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far, by its work and by the transport's own sum."""
        return self.sent + (0 if self.work is None else self.work.bytes_sent)


class Tally:
    """Tally of all exchanges since it was made.

    A step's exchanges are kept one by one until the next step begins, or until all of them are over: later ones do not
    overlap with them.

    dense: bytes that dense gradients would have taken.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: list[Exchanged] = []
        self._waiting_since: float | None = None  # since then this rank has had nothing else to do
        self._sent, self._dense, self._under_way, self._waited = 0, 0, 0.0, 0.0

    def begin(self, *, dense: int) -> Exchanged:
        """Adds an exchange; the first after a wait belongs to the next step."""
        if self._waiting_since is not None or all(one.is_over for one in self._step):
            self._sent += sum(one.bytes_sent for one in self._step)
            under_way, waited = self._seconds()
            self._under_way, self._waited = self._under_way + under_way, self._waited + waited
            self._step, self._waiting_since = [], None
        self._dense += dense
        self._step.append(one := Exchanged())
        return one

    def begin_waiting(self) -> None:
        """Notes that this rank does nothing but wait from now on."""
        if self._waiting_since is None:
            self._waiting_since = self._clock()

    def numbers(self) -> dict[str, float]:
        """Bytes and seconds so far, by the names of `communicators.Stats`."""
        under_way, waited = self._seconds()
        under_way, waited = self._under_way + under_way, self._waited + waited
        return {
            "bytes_sent": self._sent + sum(one.bytes_sent for one in self._step),
            "bytes_dense": self._dense,
            "seconds_exchanging": under_way,
            "seconds_waited": waited,
            "seconds_hidden": under_way - waited,
        }

    def _seconds(self) -> tuple[float, float]:
        """Seconds of this step with an exchange under way, and those of them in which this rank waited."""
        now = self._clock()
        works = [one.work for one in self._step if one.work is not None]
        spans = [(work.began, now if work.ended is None else work.ended) for work in works]
        since = now if self._waiting_since is None else self._waiting_since
        return covered(spans), covered((max(begin, since), end) for begin, end in spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together; those that end before they begin cover nothing."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
