"""A world of one rank: schedules run to their end, and there is nobody to talk to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from communicators.background.call import Call
from communicators.communicator import TIMEOUT_SECONDS, Communicator, Work
from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.signals import Attempt, OnSignal, Signals, refuse_too_many_waiting

T = TypeVar("T")


class Alone(Communicator):
    """World of one rank: schedules run to their end, and their errors are raised as they are."""

    outlives_ranks = True

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        del timeout, device
        call = Call(schedule, rank=0, size=1, facts=facts, number=0)
        while call.step({}) is not None:
            pass
        return cast(T, call.value)

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> _Finished[T]:
        began = self.clock()
        return _Finished(self.run(schedule, facts=facts, timeout=timeout, device=device), began, self.clock())

    def duplicate(self) -> Alone:
        return Alone()

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        return _ToItself(0, 1, on_signal)

    clock = staticmethod(time.perf_counter)

    def native_allreduce(self, tensor: Tensor, *, facts: str) -> Tensor:
        del facts
        return tensor.detach().clone(memory_format=torch.contiguous_format)


class _ToItself(Signals):
    departed = frozenset()
    _failed = ""

    def fail(self, reason: str) -> None:
        self._failed = self._failed or reason

    def check(self) -> None:
        if self._failed:
            raise CollectiveError(self._failed)

    def attempt(self, schedule: Schedule[Any], members: Sequence[int], *, facts: str) -> Attempt:
        del members
        return Alone().start(schedule, facts=facts, timeout=TIMEOUT_SECONDS)

    def leave(self, why: str) -> None:
        self.close()

    def wait_until(self, over: Callable[[], bool], timeout: float) -> None:
        if not over():
            raise TimeoutError(f"not within {timeout:g} s: there is nobody else to bring it about")

    def remind(self, seconds: float, value: int) -> None:
        time.sleep(seconds)
        self.send(0, value)

    def close(self) -> None:
        self._closed = True

    def _send(self, peers: Sequence[int], value: int) -> None:
        self._refuse_if_closed()
        for peer in peers:
            if self._on_signal is not None:
                self._on_signal(peer, value)
                continue
            refuse_too_many_waiting(peer, len(self._unread))
            self._unread[peer, value] = None


class _Finished(Work[T], Attempt):
    """A call or an attempt that is over."""

    lost = error = None
    bytes_sent = 0

    def __init__(self, value: T, began: float, ended: float) -> None:
        self.value, self.began, self.ended = value, began, ended

    def when_over(self, callback: Callable[[], None]) -> None:
        callback()

    def cancel(self) -> None:
        """Does nothing: it is over."""

    def wait(self, timeout: float | None = None) -> T:
        del timeout
        return cast(T, self.value)

    def is_completed(self) -> bool:
        return True

    def get_future(self, *beside: Work[Any]) -> torch.futures.Future[T]:
        del beside  # over like this one
        future: torch.futures.Future[T] = torch.futures.Future()
        future.set_result(self.wait())
        return future
