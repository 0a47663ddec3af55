"""Messages that a call has sent and that are not known to have come, when all else of it is over.

Over TCP an MPI send ends with the receiver's receipt, one α after the message. Nobody needs to wait for it, but it must
go on, and its buffers must live.
"""

import time
from collections.abc import Sequence

from communicators.background.control import Control
from communicators.background.engine import Driven
from communicators.background.transport import Pending
from communicators.communicator import TIMEOUT_SECONDS
from communicators.schedule import Received

GRACE_SECONDS = 0.5
"""Longest time that a message, or a receipt, of a peer that has left may still be in flight."""


class UnsentMessages(Pending, Driven):
    """Rounds of one call that lack receipts; a call without anybody to see them through waits for them."""

    lingers = True

    def __init__(self, control: Control, rounds: Sequence[Pending]) -> None:
        self.control, self._rounds, self.progressed = control, rounds, time.monotonic()

    @property
    def woken(self) -> bool:
        return self.control.transport.notices

    def done(self) -> bool:
        return all(pending.done() for pending in self._rounds)

    def received(self) -> Received:
        return {}

    def missing(self) -> list[int]:
        return sorted({peer for pending in self._rounds for peer in pending.missing()})

    def cancel(self) -> None:
        for pending in self._rounds:
            pending.cancel()

    def advance(self) -> bool:
        """Whether the messages have come, or never will: a later call finds out why."""
        try:
            if self.done():
                return True
            hopeless = self._hopeless()
        except Exception:
            hopeless = True
        if hopeless:
            self.cancel()
        return hopeless

    def abandon(self, error: BaseException | None) -> None:
        """Cancels the messages."""
        del error
        self.cancel()

    def _hopeless(self) -> bool:
        waited = time.monotonic() - self.progressed
        if self.control.abort_reason is not None or waited > TIMEOUT_SECONDS:
            return True
        return waited > GRACE_SECONDS and set(self.missing()) <= set(self.control.departed)
