"""Throttled transport on the ranks' side: a communicator whose rounds take α + β·bytes."""

import os
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from communicators import Communicator, Link, Received, Round, Schedule, Signals, Work, as_communicator

from slow_link.link import THROTTLE

T = TypeVar("T")


def behind_link(comm: Any = None) -> Communicator:
    """Returns `as_communicator(comm)`, throttled if this rank was started on a `ThrottledLink`.

    On an emulated link, and without a link, it is the same as `as_communicator`.
    """
    plain = as_communicator(comm)
    setting = os.environ.get(THROTTLE)
    return plain if setting is None else Throttled(plain, Link(*map(float, setting.split(","))))


class Throttled(Communicator):
    """Carries schedules over another communicator, each round no faster than a link would.

    A round takes α + β·b, b being the larger of what this rank sends and receives in it (full duplex). In the
    background a waiting round delays other rounds of its rank, as on one port. Signals are not slowed. There is no
    `native_allreduce`: it has no rounds to delay.
    """

    def __init__(self, comm: Communicator, link: Link) -> None:
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self._comm, self._link = comm, link

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        return self._comm.run(slowed(schedule, self._link), facts=facts, timeout=timeout, device=device)

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        return self._comm.start(slowed(schedule, self._link), facts=facts, timeout=timeout, device=device)

    @property
    def timeout(self) -> float:
        return self._comm.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._comm.timeout = seconds

    def duplicate(self) -> Communicator:
        return Throttled(self._comm.duplicate(), self._link)

    def signals(self, on_signal: Callable[[int, int], None] | None = None) -> Signals:
        return self._comm.signals(on_signal)

    def close(self) -> None:
        self._comm.close()

    def clock(self) -> float:
        return self._comm.clock()

    bytes_sent = property(attrgetter("_comm.bytes_sent"), doc="Bytes sent by the wrapped communicator.")
    messages_sent = property(attrgetter("_comm.messages_sent"), doc="Messages sent by the wrapped communicator.")


def slowed(schedule: Schedule[T], link: Link) -> Schedule[T]:
    """Makes a schedule wait after each round until the link would have carried it."""
    try:
        action = next(schedule)
        while True:
            begin = time.monotonic()
            received = yield action
            if isinstance(action, Round) and (action.sends or action.recvs):
                time.sleep(max(0.0, begin + _seconds(action, received, link) - time.monotonic()))
            action = schedule.send(received)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        schedule.close()


def _seconds(action: Round, received: Received, link: Link) -> float:
    sent = sum(payload.wire_nbytes for payload in action.sends.values())
    return link.seconds(max(sent, sum(payload.wire_nbytes for payload in received.values())))
