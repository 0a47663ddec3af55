"""Time that a rank computes between an algorithm's rounds, measured by running two ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from communicators import Received, Round, Schedule
from sparse_compress.selection import Largest
from torch import Tensor

from sparse_collectives.algorithms.table import resolve


def seconds_of_calls(
    algorithm: str, wire: str, gradients: Sequence[Tensor], k: int, clock: Callable[[], float]
) -> Iterator[float]:
    """Seconds that rank 0 computes in each of successive calls; all but the first are like those amid training.

    gradients: those of the two ranks, 1-D; selection is not counted. clock: seconds, read when the device is idle.
    """
    entry = resolve(algorithm, size=2, wire=wire)
    states = [entry.initial_state() for _ in gradients]
    while True:
        schedules = []
        for rank, (gradient, state) in enumerate(zip(gradients, states, strict=True)):
            kept = {} if state is None else {"state": state}
            sparse = (entry.select(gradient, rank, 2, k, state) if entry.prescribes else Largest(k))(gradient)
            schedules.append(entry.schedule(sparse, rank, 2, k, **kept))
        yield _run_both(schedules[0], schedules[1], clock)


def _run_both(mine: Schedule[Any], theirs: Schedule[Any], clock: Callable[[], float]) -> float:
    """Seconds inside the first schedule, which has as many rounds as the second."""
    seconds, to_me, to_them = 0.0, None, None
    while True:
        begin = clock()
        sent = _step(mine, to_me)
        seconds += clock() - begin
        back = _step(theirs, to_them)
        if sent is None or back is None:
            return seconds
        to_me, to_them = _delivered(back, to=0), _delivered(sent, to=1)


def _step(schedule: Schedule[Any], received: Received | None) -> Round | None:
    try:
        action = next(schedule) if received is None else schedule.send(received)
    except StopIteration:
        return None
    assert isinstance(action, Round), "without a cost nothing elapses"
    return action


def _delivered(sent: Round, to: int) -> Received:
    return {1 - to: sent.sends[to].clone()} if to in sent.sends else {}
