"""A schedule among some ranks that fails here alone: the others may have died, or tried something else meanwhile."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch

from communicators import errors
from communicators.background.call import Call
from communicators.background.control import CallOwner
from communicators.background.outstanding_call import OutstandingCall
from communicators.background.transport import Pending
from communicators.errors import CollectiveError
from communicators.schedule import Schedule
from communicators.signals import Attempt


class TransportAttempt(CallOwner, Attempt):
    """Attempt over a transport; owns its call, so that a reason to abort stays on this rank.

    facts: text that tells it from all other attempts; tags follow from it, so that no message of another one is taken
    for its own.
    """

    lost: int | None = None

    def __init__(self, comm: CallOwner, schedule: Schedule[Any], facts: str) -> None:
        super().__init__(comm.transport, comm.engine)
        self.count = comm.count  # type: ignore[method-assign]
        number = zlib.crc32(facts.encode())
        call = Call(schedule, rank=comm.rank, size=comm.size, facts=facts, number=number)
        self.outstanding = OutstandingCall(self, call, math.inf, torch.device("cpu"))

    @property
    def value(self) -> Any:
        return self.outstanding.call.value

    @property
    def error(self) -> CollectiveError | None:
        return self.outstanding.error

    def when_over(self, callback: Callable[[], None]) -> None:
        self.outstanding.when_over(callback)

    def cancel(self) -> None:
        self.request_abort("it was cancelled")

    def detaches(self, unsent: list[Pending]) -> bool:
        """Detaches nothing: a rank that has left the attempt takes no messages."""
        return all(pending.done() for pending in unsent)

    def request_abort(self, reason: str) -> None:
        self.control.abort_reason = self.control.abort_reason or reason

    def ask(self) -> None:
        """Asks nobody: the reason is this rank's own."""

    def lose(self, peer: int) -> None:
        self.lost = peer
        self.request_abort(errors.lost(peer))

    def report(self, call: Call, peers: list[int]) -> None:
        """Tells nobody: slow ranks are waited for."""
