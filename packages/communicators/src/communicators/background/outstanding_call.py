"""One call in flight over a transport: its rounds, its clock, and how it ends alike on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from communicators import errors
from communicators.background.call import Call, NativeSum
from communicators.background.control import CallOwner, Control, RequestedAbort
from communicators.background.engine import Ending
from communicators.background.streams import SideStream, owned_here
from communicators.background.transport import PeerLost, Pending
from communicators.communicator import TIMEOUT_SECONDS, Work
from communicators.errors import CollectiveError
from communicators.schedule import Elapse, Received, Round
from communicators.tracing import labelled

REPORT_SECONDS = 2.0
"""Wait after which a rank tells its peers what it waits for."""
GRACE_SECONDS = 0.5
"""Longest time that a message, or a receipt, of a peer that has left may still be in flight."""
LATE_ABORT_SECONDS = 0.8
"""Wait for an abort reason by a rank that has waited for its whole time-out."""


class OutstandingCall(Work[Any]):
    """A call in flight over a transport: advanced to its end, by the caller or by the engine.

    progressed: when its current round was posted, by time.monotonic().
    began, ended: by time.perf_counter(), the communicator's clock.
    device: where received payloads are put. side: its own stream there, where it has one.
    """

    lingers = False
    began, ended, error, bytes_sent = 0.0, cast(float | None, None), cast(CollectiveError | None, None), 0

    def __init__(self, comm: CallOwner, call: Call, timeout: float, device: torch.device) -> None:
        self.comm, self.call, self.began = comm, call, time.perf_counter()
        self._label = labelled("exchange")
        self._label.__enter__()
        self.finished = Ending()
        self.device, self.side = device, cast(SideStream | None, None)
        self._timeout = timeout
        self._peers: tuple[int, ...] = ()  # of the current round, some twice
        self._pending: Pending | None = None
        self._unsent: list[Pending] = []  # rounds before it of which not all is known to have come
        self._stepped_through = False  # only the last messages are under way
        self._cause: BaseException | None = None
        self._requested: RequestedAbort | None = None
        self._lost: PeerLost | None = None
        self._reported = False
        self._callbacks: list[Callable[[], None]] = []
        self.progressed = self._turn_came = time.monotonic()

    def wait(self, timeout: float | None = None) -> Any:
        if not self.comm.engine.wait(self.finished, timeout):
            call = self.call
            waiting = errors.waits(call.rank, call.number, call.facts, call.turn, sorted(set(self._peers)))
            raise TimeoutError(f"not completed within {timeout} s: {waiting}")
        return self.result() if self.side is None else owned_here(self.result(), self.device)

    def is_completed(self) -> bool:
        return self.comm.engine.wait(self.finished, 0.0)

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch future of the result, waited for without the engine's thread: nothing would complete it later."""
        if self.comm.engine.inline:
            self.comm.engine.wait(self.finished, None)
        done: torch.futures.Future[None] = torch.futures.Future(devices=[] if self.side is None else [self.device])
        self.when_over(lambda: done.set_result(None))
        return done.then(lambda _: self.result())  # what is raised here surfaces as itself

    def when_over(self, callback: Callable[[], None]) -> None:
        with self.comm.lock:
            if not self.finished.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> Any:
        """The schedule's result, or its error."""
        if self.error is not None:
            self.comm.control.told = True
            raise CollectiveError(str(self.error)) from self._cause
        return self.call.value

    def advance(self) -> bool:
        """Progresses as far as it can without blocking; True at the end."""
        if self.side is None:
            return self._go_on()
        try:
            with self.side.current():
                return self._go_on()
        except Exception as error:  # the GPU itself has failed: without it the call can still say so
            self.side = None
            self._request_abort(errors.failed(self.comm.rank, self.call.facts, error), error)
            return self._go_on()

    def _go_on(self) -> bool:
        try:
            if self._requested is None and self.comm.control.abort_reason is None and self._step_through():
                self._finish()
                return True
        except PeerLost as lost:  # `watch` requests an abort, unless a control message has said why
            if self._lost is None:
                self._lost = lost
                self.comm.lose(lost.peer)
                if lost.died:
                    self._request_abort(errors.lost(lost.peer), lost.error)
        except Exception as error:
            self._request_abort(errors.reason(self.comm.rank, self.call.facts, error), error)
        return self._failed()

    def watch(self) -> None:
        """Looks at the clock; called every few milliseconds while it does not advance."""
        if self._pending is not None and self._pending.waits_its_turn:
            self._turn_came = time.monotonic()
        waited = time.monotonic() - max(self.progressed, self._turn_came)
        if self._requested is not None or self._pending is None or waited < GRACE_SECONDS:
            return
        missing, control = self._pending.missing(), self.comm.control
        waiting = errors.waits(self.comm.rank, self.call.number, self.call.facts, self.call.turn, missing)
        if lost := control.departed_before(self.call.number, missing):
            self._request_abort(errors.left(lost[0], control.departed[lost[0]], waiting))
        elif self._lost is not None:  # no word of who noticed: if the arbiter is gone, every rank says this by itself
            self._request_abort(errors.lost(self._lost.peer), self._lost.error)
        elif waited > self._timeout:
            self._request_abort(f"timed out after {self._timeout:g} s: {waiting}", patience=LATE_ABORT_SECONDS)
        elif waited > REPORT_SECONDS and not self._reported:
            self._reported = True
            self.comm.report(self.call, missing)

    def abandon(self, error: BaseException | None = None) -> None:
        """Cancels what is in flight, at exit or after an interrupt; an error of its own also fails it on all ranks."""
        for pending in (*self._unsent, *filter(None, [self._pending])):
            pending.cancel()
        if error is not None:
            reason = errors.failed(self.comm.rank, self.call.facts, error)
            self.error, self._cause = CollectiveError(reason), error
            self.call.close()
            self._finish()
            self.comm.request_abort(reason)

    def interrupted(self, error: BaseException) -> None:
        """Ends the call on all ranks after an interrupt of its waiting rank: later calls would be out of step."""
        self.abandon()
        self.comm.control.told = True  # by the interrupt itself
        self.comm.request_abort(errors.failed(self.comm.rank, self.call.facts, error))

    def _step_through(self) -> bool:
        received: Received = {}
        while True:
            if self._pending is not None:
                if not self._pending.arrived():
                    return False
                received = self._pending.received()
                self._unsent = [*(pending for pending in self._unsent if not pending.done()), self._pending]
                self._pending = None
            if self._stepped_through:
                break
            with labelled("merge"):
                action = self.call.step(received)
            received = {}
            if action is None:
                self._see_off()
            elif not isinstance(action, Elapse):
                self._post(action)
        if self.side is not None and not self.side.is_idle():
            return False
        if self.call.doubts:
            self.call.settle()
        return True

    def _see_off(self) -> None:
        """Leaves the messages that are not known to have come to the engine, or waits for them."""
        self._stepped_through = True
        unsent = [pending for pending in self._unsent if not pending.done()]
        self._unsent = []
        if unsent and not self.comm.detaches(unsent):
            self._pending = Unsent(unsent)

    def _post(self, action: Round | NativeSum) -> None:
        if isinstance(action, NativeSum):
            self._pending = action.pending
        else:
            device = self.device if self.call.counted else torch.device("cpu")  # an agreement is read by the host
            self._pending = self.comm.transport.post(self.call, action, device)
            self._peers = *action.sends, *action.recvs
            if self.call.counted and action.sends:
                nbytes = sum([payload.wire_nbytes for payload in action.sends.values()])
                self.bytes_sent += nbytes
                self.comm.count(nbytes, len(action.sends))
        self.progressed, self._reported = time.monotonic(), False

    def _request_abort(self, reason: str, cause: BaseException | None = None, *, patience: float | None = None) -> None:
        self._cause = cause
        self.progressed = time.monotonic()
        self._requested = RequestedAbort(self.comm, reason, patience=patience)

    def _failed(self) -> bool:
        """Ends with the abort reason once there is one; a rank that requested the abort waits for it."""
        if self._requested is not None and not self._requested.settled():
            return False
        reason = self.comm.control.abort_reason
        if reason is None:
            return False
        self.error = CollectiveError(reason)
        self.abandon()
        self.call.close()
        self._finish()
        return True

    def _finish(self) -> None:
        self.comm.over(self.call)
        self._label.__exit__(None, None, None)  # maybe in another thread
        self.ended = time.perf_counter()
        with self.comm.lock:
            self.finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Unsent(Pending):
    """Messages that earlier rounds have sent, and that are not known to have come."""

    def __init__(self, rounds: list[Pending]) -> None:
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


class DetachedSends:
    """Last messages of one call, which has all that it receives; the engine sees them through.

    Over TCP an MPI send ends with the receiver's receipt, one α after the message. Nobody needs to wait for it, but it
    must go on, and its buffers must live. control: that of its communicator.
    """

    lingers = True

    def __init__(self, control: Control, unsent: list[Pending]) -> None:
        self.control, self.progressed = control, time.monotonic()
        self._unsent = Unsent(unsent)

    def advance(self) -> bool:
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
        """Does nothing: `advance` looks at the clock."""

    def abandon(self, error: BaseException | None) -> None:
        """Cancels the messages."""
        del error
        self._unsent.cancel()

    def _hopeless(self) -> bool:
        waited = time.monotonic() - self.progressed
        if self.control.abort_reason is not None or waited > TIMEOUT_SECONDS:
            return True
        return waited > GRACE_SECONDS and set(self._unsent.missing()) <= set(self.control.departed)
