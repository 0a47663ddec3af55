"""Ranks agree on a step after which all of them stop, when a signal has asked any of them to.

About once a second they add up who was asked, in the background: what was started at one such step is looked at by all
ranks at the next one, and there they stop, or go on. So no step waits for the answer, and a signal takes two seconds.
How many steps that is follows from the same sum, so that ranks agree on it, too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import torch
from communicators import Communicator, Work, dense_schedules, start
from torch import Tensor

BETWEEN = 1.0  # seconds
LONGEST = 1 << 12  # steps; the rate of a run changes
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AgreedStop:
    """asked: the number of the signal that has asked this rank to stop, 0 if none has. first_step: taken already."""

    def __init__(
        self,
        comm: Communicator,
        asked: Callable[[], int],
        *,
        first_step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._comm, self._asked, self._clock = comm, asked, clock
        self._sum: Work[Tensor] | None = None
        self._ahead = 1  # steps from one sum to the next
        self._last, self._next, self._began = first_step, first_step + 1, clock()

    def after(self, step: int) -> int:
        """The signal by which all ranks stop now, after so many steps, 0 to go on. To be called after every step."""
        if step < self._next:
            return 0
        number = self._decide()
        if not number:
            self._ask(step)
        return number

    def close(self) -> None:
        """Waits for what was asked last. To be called after the last step, on every rank."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None

    def _decide(self) -> int:
        if self._sum is None:
            return 0
        *asked, seconds = self._sum.wait().tolist()
        self._sum = None
        steps = self._comm.size * BETWEEN / seconds if seconds > 0 else LONGEST
        self._ahead = int(min(max(steps, 1), LONGEST))
        return next((int(number) for number, ranks in zip(SIGNALS, asked, strict=True) if ranks), 0)

    def _ask(self, step: int) -> None:
        now, number = self._clock(), self._asked()
        seconds = (now - self._began) / (step - self._last)
        told = torch.tensor([*(float(number == one) for one in SIGNALS), seconds], dtype=torch.float64)
        schedule = dense_schedules.allreduce(told, self._comm.rank, self._comm.size)
        self._sum = start(schedule, self._comm, facts="whether to stop", device=told.device)
        self._last, self._began, self._next = step, now, step + self._ahead
