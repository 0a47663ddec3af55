"""Cost and savings of exchanges, in seconds."""

from __future__ import annotations

from collections.abc import Iterable

from local_sgd.averaging import Averaging


def hidden_fraction(averagings: Iterable[Averaging]) -> float | None:
    """Share of the exchanges' seconds in which this rank did not wait; None before the first exchange."""
    waited, under_way = _seconds(averagings)
    return max(0.0, 1.0 - waited / under_way) if under_way > 0 else None


def seconds(averagings: Iterable[Averaging]) -> dict[str, float]:
    """Seconds of the exchanges, for `communicators.Stats`."""
    waited, under_way = _seconds(averagings)
    hidden = max(0.0, under_way - waited)
    return {"seconds_exchanging": under_way, "seconds_waited": waited, "seconds_hidden": hidden}


def _seconds(averagings: Iterable[Averaging]) -> tuple[float, float]:
    waited, under_way = map(sum, zip(*(averaging.seconds for averaging in averagings), strict=True))
    return waited, under_way
