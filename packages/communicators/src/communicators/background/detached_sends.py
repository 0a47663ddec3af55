"""Messages that a call has left behind: it has all that it receives, but not all that it sent is known to have come.

Over TCP an MPI send ends with the receiver's receipt, one α after the message. Nobody needs to wait for it, but it
must go on, and its buffers must live.
"""

from __future__ import annotations

import time

from communicators.background.abort import Control
from communicators.background.transport import Unsent
from communicators.communicator import TIMEOUT_SECONDS

GRACE_SECONDS = 0.5
"""Longest time that the receipt of a peer that has left may still be in flight."""


class DetachedSends:
    """Last messages of one call, which the engine sees through. control: that of its communicator."""

    lingers = True

    def __init__(self, control: Control, unsent: Unsent) -> None:
        self.control, self.progressed = control, time.monotonic()
        self._unsent = unsent

    def poll(self) -> bool:
        """Whether the messages have come, or never will: a later call finds out why."""
        try:
            if self._unsent.done():
                return True
            lost = False
        except Exception:
            lost = True
        if lost or self._hopeless():
            self._unsent.cancel()
            return True
        return False

    def watch(self) -> None:
        """Does nothing: `poll` looks at the clock."""

    def abandon(self, error: BaseException | None) -> None:
        """Cancels the messages."""
        del error
        self._unsent.cancel()

    def _hopeless(self) -> bool:
        waited = time.monotonic() - self.progressed
        if self.control.abort_reason is not None or waited > TIMEOUT_SECONDS:
            return True
        return waited > GRACE_SECONDS and set(self._unsent.missing()) <= set(self.control.departed)
