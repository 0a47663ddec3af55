"""Abort reason that this rank has found, until all ranks agree on one."""

from __future__ import annotations

import time
from typing import Protocol

from communicators.background.abort import Control

ABORT_SECONDS = 5.0
"""Wait for an abort reason, after which a rank raises its own.

After half of it all ranks are asked for one, after three quarters the next arbiter.
"""


class Requester(Protocol):
    """Communicator that cannot proceed."""

    control: Control

    def request_abort(self, reason: str) -> None:
        """Tells the arbiter the reason."""

    def ask(self) -> None:
        """Asks all ranks, as the arbiter does not answer."""

    def lose(self, peer: int) -> None:
        """Marks a peer that does not answer."""


class RequestedAbort:
    """Abort that this rank has requested.

    reason: this rank's own; the agreed one, `control.abort_reason`, may be another rank's.
    patience: seconds, default ABORT_SECONDS.
    """

    def __init__(self, comm: Requester, reason: str, *, patience: float | None = None) -> None:
        self.reason = reason
        self._comm, self._patience = comm, ABORT_SECONDS if patience is None else patience
        self._begin, self._asked, self._asked_next = time.monotonic(), False, False
        comm.request_abort(reason)

    def settled(self) -> bool:
        """Whether there is an abort reason: the arbiter's, the next one's, or at last this rank's own."""
        control, waited = self._comm.control, time.monotonic() - self._begin
        if control.abort_reason is not None:
            return True
        if waited > self._patience / 2 and not self._asked:
            self._asked = True
            self._comm.ask()
        if waited > self._patience * 3 / 4 and not self._asked_next:
            self._asked_next = True
            self._comm.lose(control.arbiter)
        if waited < self._patience:
            return False
        control.abort_reason = self.reason
        return True
