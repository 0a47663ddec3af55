"""A schedule among some ranks that fails here alone: the others may have died, or tried something else meanwhile."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from communicators import errors
from communicators.background.abort import Control
from communicators.background.call import Call
from communicators.background.outstanding_call import OutstandingCall
from communicators.background.transport import Transport, Unsent
from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.signals import Attempt


class Group(Protocol):
    """Communicator whose transport carries an attempt."""

    rank: int
    size: int
    transport: Transport
    lock: threading.RLock

    def count(self, nbytes: int, messages: int) -> None:
        """Counts bytes and messages that this rank has sent."""


class TransportAttempt(Attempt):
    """Attempt over a transport; owns its call, so that a reason to abort stays on this rank.

    facts: text that tells it from all other attempts; tags follow from it, so that no message of another one is taken
    for its own.
    """

    def __init__(self, comm: Group, schedule: Schedule[Any], facts: str) -> None:
        self.rank, self.transport, self.lock = comm.rank, comm.transport, comm.lock
        self.control, self._comm = Control(comm.rank, comm.size), comm
        self._lost: int | None = None
        number = zlib.crc32(facts.encode())
        call = Call(schedule, rank=comm.rank, size=comm.size, facts=facts, number=number)
        self.outstanding = OutstandingCall(self, call, math.inf, torch.device("cpu"))

    @property
    def value(self) -> Any:
        return self.outstanding.call.value

    @property
    def error(self) -> CollectiveError | None:
        return self.outstanding.error

    @property
    def lost(self) -> int | None:
        return self._lost

    def when_over(self, callback: Callable[[], None]) -> None:
        self.outstanding.when_finished(callback)

    def cancel(self) -> None:
        self.request_abort("it was cancelled")

    def count(self, nbytes: int, messages: int) -> None:
        """Counts traffic on the attempt's communicator."""
        self._comm.count(nbytes, messages)

    def detaches(self, unsent: Unsent) -> bool:
        """Detaches nothing: a rank that has left the attempt takes no messages."""
        return unsent.done()

    def over(self, call: Call) -> None:
        """Tells the transport that the call has ended."""
        self.transport.ended(call)

    def request_abort(self, reason: str) -> None:
        """Fails the attempt on this rank alone; nobody else hears of it."""
        self.control.abort_reason = self.control.abort_reason or reason

    def ask(self) -> None:
        """Asks nobody: the reason is this rank's own."""

    def lose(self, peer: int) -> None:
        """Fails the attempt because a peer is lost."""
        self._lost = peer
        self.request_abort(errors.lost(peer))

    def report(self, call: Call, peers: list[int]) -> None:
        """Tells nobody: slow ranks are waited for."""
