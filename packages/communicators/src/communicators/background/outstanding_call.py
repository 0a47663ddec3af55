"""One call in flight over a transport: its rounds, its clock, and how it ends alike on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch

from communicators import errors
from communicators.background.abort import Control
from communicators.background.call import Call, NativeSum
from communicators.background.engine import Ending, Engine
from communicators.background.requested_abort import RequestedAbort
from communicators.background.streams import SideStream, devices_of, owned_here
from communicators.background.transport import PeerLost, Pending, Transport, Unsent
from communicators.communicator import Work
from communicators.errors import CollectiveError
from communicators.schedule import Elapse, Received, Round
from communicators.tracing import labelled

T = TypeVar("T")

REPORT_SECONDS = 2.0
"""Wait after which a rank tells its peers what it waits for."""
LEAVE_GRACE_SECONDS = 0.5
"""Longest time that a message of a peer that has left may still be in flight."""
LATE_ABORT_SECONDS = 0.8
"""Wait for an abort reason by a rank that has waited for its whole time-out."""


class CallOwner(Protocol):
    """Owner of a call: the communicator or attempt that it belongs to."""

    rank: int
    transport: Transport
    control: Control
    lock: threading.RLock

    def count(self, nbytes: int, messages: int) -> None:
        """Counts bytes and messages that this rank has sent."""

    def detaches(self, unsent: Unsent) -> bool:
        """Whether the last messages of a call are left to the engine, so that the call is over."""

    def over(self, call: Call) -> None:
        """Notes that a call has ended, or failed."""

    def request_abort(self, reason: str) -> None:
        """Tells the arbiter why a collective cannot proceed."""

    def ask(self) -> None:
        """Asks all ranks, as the arbiter does not answer."""

    def lose(self, peer: int) -> None:
        """Marks a peer that cannot be reached any more, or does not answer."""

    def report(self, call: Call, peers: list[int]) -> None:
        """Tells the peers what this rank waits for."""


class OutstandingCall:
    """A call in flight over a transport: polled to its end, by the caller or by the engine.

    progressed: when its current round was posted, by time.monotonic().
    began, ended: by time.perf_counter(), the communicator's clock.
    device: where received payloads are put. side: its own stream there, where it has one.
    """

    lingers = False

    def __init__(self, comm: CallOwner, call: Call, timeout: float, device: torch.device) -> None:
        self.comm, self.call = comm, call
        self.began, self.ended = time.perf_counter(), cast(float | None, None)
        self._label = labelled("exchange")
        self._label.__enter__()
        self.finished = Ending()
        self.error: CollectiveError | None = None
        self.bytes_sent = 0
        self.device, self.side = device, cast(SideStream | None, None)
        self._timeout = timeout
        self._stepped_through = False
        self._peers: tuple[int, ...] = ()  # of the current round, some twice
        self._pending: Pending | None = None
        self._unsent: list[Pending] = []  # rounds before it of which not all is known to have come
        self._cause: BaseException | None = None
        self._requested: RequestedAbort | None = None
        self._lost: PeerLost | None = None
        self._reported = False
        self._callbacks: list[Callable[[], None]] = []
        self.progressed = self._turn_came = time.monotonic()

    @property
    def peers(self) -> list[int]:
        """Peers of the current round."""
        return sorted(set(self._peers))

    def poll(self) -> bool:
        """Progresses as far as it can without blocking; True at the end."""
        if self.side is None:
            return self._poll()
        try:
            with self.side.current():
                return self._poll()
        except Exception as error:  # the GPU itself has failed: without it the call can still say so
            self.side = None
            self._request_abort(errors.failed(self.comm.rank, self.call.facts, error), error)
            return self._poll()

    def _poll(self) -> bool:
        try:
            if self._requested is None and self.comm.control.abort_reason is None and self._advance():
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
        """Looks at the clock; called every few milliseconds while a poll finds nothing."""
        if self._pending is not None and self._pending.waits_its_turn():
            self._turn_came = time.monotonic()
        waited = time.monotonic() - max(self.progressed, self._turn_came)
        if self._requested is not None or self._pending is None or waited < LEAVE_GRACE_SECONDS:
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

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Calls back at the end, or at once if the call is over."""
        with self.comm.lock:
            if not self.finished.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def abandon(self, error: BaseException | None = None) -> None:
        """Cancels what is in flight, at exit or after an interrupt; an error of a poll also fails it on all ranks."""
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

    def result(self) -> Any:
        """The schedule's result, or its error."""
        if self.error is not None:
            self.comm.control.told = True
            raise CollectiveError(str(self.error)) from self._cause
        return self.call.value

    def _advance(self) -> bool:
        received: Received = {}
        while True:
            if self._pending is not None:
                if not self._pending.arrived():
                    return False
                received = self._pending.received()
                self._unsent, self._pending = [*self._still_unsent(), self._pending], None
            if self._stepped_through:
                break
            with labelled("merge"):
                action = self.call.step(received)
            received = {}
            if action is None:
                unsent, self._unsent = Unsent(self._still_unsent()), []
                self._stepped_through = True
                self._pending = None if self.comm.detaches(unsent) else unsent
            elif not isinstance(action, Elapse):
                self._post(action)
        if self.side is not None and not self.side.is_idle():
            return False
        self.call.settle()
        return True

    def _still_unsent(self) -> list[Pending]:
        return [pending for pending in self._unsent if not pending.done()]

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


class TransportWork(Work[T]):
    """A started call; the engine drives it."""

    def __init__(self, outstanding: OutstandingCall, engine: Engine) -> None:
        self._outstanding, self._engine = outstanding, engine

    def wait(self, timeout: float | None = None) -> T:
        if not self._over_within(timeout):
            call = self._outstanding.call
            waiting = errors.waits(call.rank, call.number, call.facts, call.turn, self._outstanding.peers)
            raise TimeoutError(f"not completed within {timeout} s: {waiting}")
        result = cast(T, self._outstanding.result())
        return result if self._outstanding.side is None else owned_here(result, self._outstanding.device)

    def is_completed(self) -> bool:
        return self._over_within(0.0)

    def get_future(self) -> torch.futures.Future[T]:
        """A torch future of the result, waited for without the engine's thread: nothing would complete it later."""
        outstanding = self._outstanding
        if self._engine.inline:
            self._over_within(None)
        done: torch.futures.Future[None] = torch.futures.Future(devices=devices_of(outstanding.device))
        outstanding.when_finished(lambda: done.set_result(None))
        return done.then(lambda _: outstanding.result())  # what is raised here surfaces as itself

    @property
    def error(self) -> CollectiveError | None:
        return self._outstanding.error

    def when_over(self, callback: Callable[[], None]) -> None:
        self._outstanding.when_finished(callback)

    @property
    def bytes_sent(self) -> int:
        return self._outstanding.bytes_sent

    @property
    def began(self) -> float:
        return self._outstanding.began

    @property
    def ended(self) -> float | None:
        return self._outstanding.ended

    def _over_within(self, timeout: float | None) -> bool:
        finished = self._outstanding.finished
        return self._engine.wait(finished.is_set, finished, timeout)
