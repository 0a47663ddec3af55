"""Calls that take turns, so that what else the machine does meets all of them."""

import time
from collections.abc import Callable, Hashable, Mapping
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


def seconds_of(call: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    began = clock()
    call()
    return clock() - began
