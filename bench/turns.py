"""Calls that take turns, so that what else the machine does meets all of them."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Found = TypeVar("Found")


def in_turns(
    calls: Mapping[Name, Callable[[], Found]], rounds: int, *, before: Callable[[], object] = lambda: None
) -> dict[Name, list[Found]]:
    """Results of each call in every round. A first round warms up and does not count. before: of each call."""
    found: dict[Name, list[Found]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            before()
            result = call()
            found[name] += [result] * (number > 0)
    return found


def milliseconds(
    calls: Sequence[Callable[[], object]], rounds: int, *, clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """Milliseconds of each call in every round, the calls taking turns, by default of CPU time."""
    timed = {number: partial(seconds_of, call, clock=clock) for number, call in enumerate(calls)}
    return [[1e3 * seconds for seconds in taken] for taken in in_turns(timed, rounds).values()]


def seconds_of(call: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    began = clock()
    call()
    return clock() - began
