"""What a run says between its ranks besides training: evaluations, checkpoints, agreements. It is counted apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from communicators import Communicator, Round, Schedule, Work

T = TypeVar("T")


class Aside(Communicator):
    """The same ranks by the same communicator, whose messages are training's and these.

    bytes_sent, messages_sent: of what was called through this object, exactly, whatever goes on in the background.
    Sums go by our own schedule, so that metrics have the same bits in every world.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self._timeout = comm.timeout
        self._started: WeakSet[Work[Any]] = WeakSet()

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        """See `communicators.run`."""
        return self._comm.run(self._counted(schedule), facts=facts, timeout=timeout, device=device)

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        """See `communicators.start`."""
        work = self._comm.start(self._counted(schedule), facts=facts, timeout=timeout, device=device)
        self._started.add(work)
        return work

    def settle(self) -> None:
        """Waits for what was started, so that both sides have counted it: where it is just being sent, one has."""
        for work in list(self._started):
            work.wait()
        self._started.clear()

    def clock(self) -> float:
        """See `Communicator.clock`."""
        return self._comm.clock()

    def elapse(self, seconds: float) -> None:
        """See `Communicator.elapse`."""
        self._comm.elapse(seconds)

    def _counted(self, schedule: Schedule[T]) -> Schedule[T]:
        try:
            action = next(schedule)
            while True:
                if isinstance(action, Round):
                    self.bytes_sent += sum(payload.numel() for payload in action.sends.values())
                    self.messages_sent += len(action.sends)
                action = schedule.send((yield action))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            schedule.close()


class Meter:
    """Bytes that this rank sends for training: all that `comm` counts, and what goes elsewhere, but for `aside`."""

    def __init__(self, comm: Communicator, aside: Aside, elsewhere: Callable[[], int]) -> None:
        self._comm, self._aside, self._elsewhere = comm, aside, elsewhere
        self._read = self._total()

    def begin(self) -> None:
        """Forgets what was sent until now, such as the first broadcast."""
        self._aside.settle()
        self._read = self._total()

    def read(self) -> int:
        """Bytes since it was last read, or begun. For every rank to call, at the same step."""
        self._aside.settle()
        before, self._read = self._read, self._total()
        return self._read - before

    def _total(self) -> int:
        return self._comm.bytes_sent - self._aside.bytes_sent + self._elsewhere()
