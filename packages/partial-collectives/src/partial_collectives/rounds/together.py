"""A round's collective as a call of the communicator: a death fails it on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from communicators import Attempt, CollectiveError, Communicator, Schedule, start


class Together(Attempt):
    """Attempt of all ranks, which waits for slow ones."""

    lost = None

    def __init__(self, schedule: Schedule[Any], comm: Communicator, facts: str) -> None:
        self._value: Any = None
        self._work = start(self._kept(schedule), comm, facts=facts, timeout=math.inf)

    @property
    def value(self) -> Any:
        return self._value

    @property
    def error(self) -> CollectiveError | None:
        """Error of the call, the same on all ranks; None while it has not failed."""
        return self._work.error

    def when_over(self, callback: Callable[[], None]) -> None:
        self._work.when_over(callback)

    def cancel(self) -> None:
        """Raises NotImplementedError: all ranks make the communicator's calls, and none can leave one alone."""
        raise NotImplementedError("a call of all ranks cannot be left by one")

    def _kept(self, schedule: Schedule[Any]) -> Schedule[None]:
        self._value = yield from schedule
