"""Messages that a call has sent and that are not known to have come, when all else of it is over.

Over TCP an MPI send ends with the receiver's receipt, one α after the message. Nobody needs to wait for it, but it must
go on, and its buffers must live.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from communicators.background.control import Control
from communicators.background.engine import Driven
from communicators.background.transport import Pending
from communicators.communicator import TIMEOUT_SECONDS
from communicators.schedule import Received

GRACE_SECONDS = 0.5
"""Longest time that a message, or a receipt, of a peer that has left may still be in flight."""


class Unsent(Pending):
    """Rounds of which this rank waits for the receipts."""

    def __init__(self, rounds: Sequence[Pending]) -> None:
        self._rounds = rounds

    def done(self) -> bool:
        return all(pending.done() for pending in self._rounds)

    def received(self) -> Received:
        return {}

    def missing(self) -> list[int]:
        return sorted({peer for pending in self._rounds for peer in pending.missing()})

    def cancel(self) -> None:
        for pending in self._rounds:
            pending.cancel()


class DetachedSends(Driven):
    """Last messages of one call, which has all that it receives; the engine sees them through."""

    lingers = True

    def __init__(self, control: Control, unsent: Unsent) -> None:
        self.control, self._unsent, self.progressed = control, unsent, time.monotonic()

    def advance(self) -> bool:
        """Whether the messages have come, or never will: a later call finds out why."""
        try:
            if self._unsent.done():
                return True
            hopeless = self._hopeless()
        except Exception:
            hopeless = True
        if hopeless:
            self._unsent.cancel()
        return hopeless

    def abandon(self, error: BaseException | None) -> None:
        """Cancels the messages."""
        del error
        self._unsent.cancel()

    def _hopeless(self) -> bool:
        waited = time.monotonic() - self.progressed
        if self.control.abort_reason is not None or waited > TIMEOUT_SECONDS:
            return True
        return waited > GRACE_SECONDS and set(self._unsent.missing()) <= set(self.control.departed)
