"""Communicator over any transport, and its calls in flight.

Numbering calls, agreeing on facts, watching the clock, failing alike on all ranks and going on in the background is
the same for every transport.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from communicators import errors
from communicators.background.agreement import agreement
from communicators.background.call import Call, NativeSum
from communicators.background.control import ABORT_SECONDS, TIMED_OUT, Control, RequestedAbort, depart
from communicators.background.engine import SPIN_SECONDS, Driven, engine
from communicators.background.sends import GRACE_SECONDS, UnsentMessages
from communicators.background.signals import TransportSignals
from communicators.background.streams import SideStream, SideStreams, owned_here, with_index
from communicators.background.transport import PeerLost, Pending, Transport, check_transport, wrong_return
from communicators.communicator import Communicator, Work, refuse_too_many
from communicators.errors import CollectiveError
from communicators.labels import are_kept, labelled, spanning
from communicators.schedule import SLOT_BYTES, Elapse, Received, Round, Schedule, among
from communicators.schedules.dense import barrier
from communicators.signals import Attempt, OnSignal, Signals
from communicators.timeline import message

T = TypeVar("T")

CLOSED = "it closed the communicator"
FAIL_SECONDS = 10.0
"""Upper bound on the end of a call in flight on a failed communicator, which comes much sooner."""
REPORT_SECONDS = 2.0
"""Wait after which a rank tells its peers what it waits for."""
RETIRE_SECONDS = 1.0
"""Longest time that messages of a retired communicator may take to be sent."""
HASTY_ABORT_SECONDS = 0.2
"""Wait for an abort reason after a time-out where the communicator is `hasty`."""
ROUNDS_A_TURN = 64
"""Most rounds of a call, each of which needs no waiting, before the other calls have their turn."""
CPU = torch.device("cpu")
_NO_STREAM = nullcontext()


class OutstandingCall(Work[Any], Attempt, Driven):
    """A call in flight over a transport: advanced to its end, by the caller or by the engine.

    control: the communicator's, so that all ranks fail alike; one of its own for an attempt, which fails here alone.
    progressed: when its current round was posted, by time.monotonic(). began, ended: by the communicator's clock.
    device: where received payloads are put. side: its own stream there, where it has one.
    """

    ended: float | None = None
    error: CollectiveError | None = None
    value, bytes_sent = None, 0

    def __init__(
        self, comm: TransportCommunicator, call: Call, timeout: float, device: torch.device, control: Control
    ) -> None:
        self.comm, self.control, self.call, self.began = comm, control, call, time.perf_counter()
        self._label = spanning("exchange")
        self._label.__enter__()
        self.device, self.side = device, cast(SideStream | None, None)
        self._timeout = timeout
        self.peers: tuple[int, ...] = ()
        self._sources: Collection[int] = ()  # those that it lacks messages of, as far as it has looked
        self._pending: Pending | None = None
        self._unsent: list[Pending] = []  # rounds before it of which not all is known to have come
        self._stepped_through = False  # only the last messages are under way
        self._cause: BaseException | None = None
        self._requested: RequestedAbort | None = None
        self._lost: PeerLost | None = None
        self._reported = False
        self._awaited: threading.Event | None = None
        self._coming: dict[int, AbstractContextManager[object]] = {}  # labels of messages of the current round
        self._callbacks: list[Callable[[], None]] = []
        self.progressed = self._turn_came = time.monotonic()

    @property
    def woken(self) -> bool:
        return self.comm.transport.notices and self.side is None

    @property
    def lost(self) -> int | None:  # type: ignore[override]
        return None if self._lost is None else self._lost.peer

    def wait(self, timeout: float | None = None) -> Any:
        if not self.is_over(timeout):
            raise TimeoutError(f"not completed within {timeout} s: {self.call.waits(self.peers)}")
        return self.result() if self.side is None else owned_here(self.result(), self.device)

    def is_completed(self) -> bool:
        return self.is_over(0.0)

    def is_over(self, timeout: float | None) -> bool:
        """Whether it is over within `timeout` seconds."""
        if self.comm.engine.inline:
            with labelled("wait") if timeout != 0 else _NO_STREAM:
                self.comm.engine.drive_until(lambda: self.ended is not None, timeout)
        elif self.ended is None and timeout != 0:
            self.comm.engine.check_wait()
            with self.control.lock:
                self._awaited = self._awaited or threading.Event()  # hardly any call is waited for
            if self.ended is None:
                with labelled("wait"):
                    self._awaited.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return self.ended is not None

    def get_future(self, *beside: Work[Any]) -> torch.futures.Future[Any]:
        """A torch future of the result, waited for without the engine's thread: nothing would complete it later."""
        works = (self, *beside)
        if self.comm.engine.inline:
            with labelled("wait"):
                self.comm.engine.drive_until(lambda: all(work.ended is not None for work in works), None)
        done: torch.futures.Future[None] = torch.futures.Future(devices=[] if self.side is None else [self.device])
        when_all_over: Callable[[], None] = partial(done.set_result, None)
        for work in works:
            when_all_over = partial(work.when_over, when_all_over)
        when_all_over()
        return done.then(lambda _: self.result())  # what is raised here surfaces as itself

    def when_over(self, callback: Callable[[], None]) -> None:
        with self.control.lock:
            if self.ended is None:
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> Any:
        """The schedule's result, or its error."""
        if self.error is not None:
            self.control.told = True
            raise CollectiveError(str(self.error)) from self._cause
        return self.value

    def cancel(self) -> None:
        self.control.request_abort("it was cancelled")
        self.comm.engine.wake()

    def advance(self) -> bool:
        """Progresses as far as it can without blocking; True at the end."""
        try:
            if self._requested is None and self.control.abort_reason is None:
                with _NO_STREAM if self.side is None else self.side.current():
                    if self._step_through():
                        self._finish()
                        return True
        except PeerLost as lost:
            if self._lost is None:
                self._lose(lost)
        except Exception as error:
            self._request_abort(errors.reason(self.control.rank, self.call.facts, error), error)
        return (self._requested is not None or self.control.abort_reason is not None) and self._failed()

    def _lose(self, lost: PeerLost) -> None:
        """Notes a peer that is gone: `watch` requests an abort, unless a control message has said why."""
        self._lost = lost
        self.control.lose(lost.peer)
        if lost.died or self.control.alone or self.comm.hasty:
            self._request_abort(errors.lost(lost.peer), lost.error)

    def watch(self) -> None:
        """Looks at the clock; called every few milliseconds while it does not advance."""
        if self._pending is not None and self._pending.waits_its_turn:
            self._turn_came = time.monotonic()
        waited = time.monotonic() - max(self.progressed, self._turn_came)
        if self._requested is not None or self._pending is None or waited < GRACE_SECONDS:
            return
        missing, control, call = self._pending.missing(), self.control, self.call
        if not isinstance(missing, list):
            raise wrong_return(self._pending, "missing", missing, "a list of peers")
        self._sources = [peer for peer in self._sources if peer in missing] or self._sources
        waiting = call.waits(missing)
        if left := control.departed_before(call.number, missing):
            self._request_abort(errors.left(left[0], control.departed[left[0]], waiting))
        elif not self._reported and waited > min(REPORT_SECONDS, self._timeout / 2):
            self._reported = True
            control.waits(call.number, call.facts, missing)
        elif not control.hears():
            return
        elif self._lost is not None:  # no word of who noticed: if the arbiter is gone, every rank says this by itself
            self._request_abort(errors.lost(self._lost.peer), self._lost.error)
        elif waited > self._timeout:
            patience = HASTY_ABORT_SECONDS if self.comm.hasty else ABORT_SECONDS
            self._request_abort(f"{TIMED_OUT} after {self._timeout:g} s: {waiting}", patience=patience)

    def abandon(self, error: BaseException | None = None) -> None:
        """Cancels what is in flight, at exit or after an interrupt; an error of its own also fails it on all ranks."""
        for pending in (*self._unsent, *filter(None, [self._pending])):
            pending.cancel()
        if error is not None:
            reason = errors.failed(self.control.rank, self.call.facts, error)
            self.error, self._cause = CollectiveError(reason), error
            self.call.close()
            self._finish()
            self.control.request_abort(reason)

    def interrupted(self, error: BaseException) -> None:
        """Ends the call on all ranks after an interrupt of its waiting rank: later calls would be out of step."""
        self.abandon()
        self.call.close()
        self.control.told = True  # by the interrupt itself
        self.control.request_abort(errors.failed(self.control.rank, self.call.facts, error))

    def _step_through(self) -> bool:
        """Takes rounds that have arrived and posts the next ones; True once nothing of the call is waited for.

        A schedule that never waits leaves others their turn after ROUNDS_A_TURN of them.
        """
        received: Received = {}
        for _ in range(ROUNDS_A_TURN):
            if self._pending is not None:
                if not (arrived := self._pending.arrived()):
                    if arrived is None:
                        raise wrong_return(self._pending, "done", None, "True or False")
                    if self._coming:
                        self._end_labels(self._pending.come())
                    return False
                self._end_labels(list(self._coming))
                received = self._pending.received()
                if not isinstance(received, dict):
                    raise wrong_return(self._pending, "received", received, "a dict of payloads by peer")
                self.comm.count(awaited=self._sources, seconds=time.monotonic() - self.progressed)
                self._unsent = [*(pending for pending in self._unsent if not pending.done()), self._pending]
                self._pending = None
            if self._stepped_through:
                break
            with labelled("merge"):
                action = self.call.step(received)
            received = {}
            if action is None:
                self._stepped_through, self._sources = True, ()
                if unsent := [pending for pending in self._unsent if not pending.done()]:
                    self._see_off(UnsentMessages(self.control, unsent))
                self._unsent = []
            elif not isinstance(action, Elapse):
                self._post(action)
        else:
            self.comm.engine.notice()
            return False
        if self.side is not None and not self.side.is_idle():
            return False
        if self.call.doubts:
            self.call.settle()
        return True

    def _see_off(self, unsent: UnsentMessages) -> None:
        """Leaves the last messages to the engine, or waits for them: a rank that leaves an attempt takes none."""
        if self.control.alone or not self.comm.engine.drives:
            self._pending = unsent
        else:
            self.comm.engine.add(unsent)

    def _post(self, action: Round | NativeSum) -> None:
        self._sources = () if isinstance(action, NativeSum) else action.recvs
        if isinstance(action, NativeSum):
            self._pending = action.pending
        else:
            device = self.device if self.call.counted else CPU  # an agreement is read by the host
            if are_kept():
                self._label_messages(action)
            self._pending = self.comm.transport.post(self.call, action, device)
            if self._pending is None:
                raise wrong_return(self.comm.transport, "post", None, "a Pending")
            self.peers = *action.sends, *action.recvs
            if self.call.counted and action.sends:
                nbytes = sum([payload.wire_nbytes for payload in action.sends.values()])
                self.bytes_sent += nbytes
                self.comm.count(nbytes, len(action.sends))
        self.progressed, self._reported = time.monotonic(), False

    def _label_messages(self, action: Round) -> None:
        """Labels what is sent in this round, at one moment, and what comes, until it has."""
        group = f"{zlib.crc32(self.comm.transport.group.encode()):x}"
        for peer, payload in action.sends.items():
            with spanning(message("to", peer, payload.wire_nbytes, f"{group}.{self.call.key(peer, sends=True)}")):
                pass
        for peer, nbytes in action.recvs.items():
            key = f"{group}.{self.call.key(peer, sends=False)}"
            self._coming[peer] = spanning(message("from", peer, nbytes + SLOT_BYTES, key))
            self._coming[peer].__enter__()

    def _end_labels(self, peers: Sequence[int]) -> None:
        for peer in peers:
            if (label := self._coming.pop(peer, None)) is not None:
                label.__exit__(None, None, None)

    def _request_abort(
        self, reason: str, cause: BaseException | None = None, *, patience: float = ABORT_SECONDS
    ) -> None:
        self._cause = cause
        self.progressed = time.monotonic()
        self._requested = RequestedAbort(self.control, reason, patience=patience)

    def _failed(self) -> bool:
        """Ends with the abort reason; a rank that has requested the abort waits until there is one."""
        if self._requested is not None and not self._requested.settled():
            return False
        self.error = CollectiveError(cast(str, self.control.abort_reason))
        self.abandon()
        self.call.close()
        self._finish()
        return True

    def _finish(self) -> None:
        self._end_labels(list(self._coming))
        self._label.__exit__(None, None, None)  # maybe in another thread
        self.value = self.call.value
        with self.control.lock:
            self.control.in_flight.discard(self.call.number)
            if self.comm.transport.untagged is not None:
                self.comm.transport.ended(self.call)
            self.ended = time.perf_counter()
            callbacks, self._callbacks = self._callbacks, []
        if self._awaited is not None:
            self._awaited.set()
        for callback in callbacks:
            callback()


class TransportCommunicator(Communicator):
    """A communicator over a transport."""

    def __init__(self, transport: Transport, origin: TransportCommunicator | None = None) -> None:
        check_transport(transport)
        self.rank, self.size, self.transport, self.engine = transport.rank, transport.size, transport, engine()
        self.control = Control(transport)
        self.device, self.outlives_ranks = transport.device, transport.outlives_ranks
        self.bytes_sent = self.messages_sent = 0
        self._awaited = dict[int, float]()
        self.origin = origin  # whose duplicate this is
        self._calls = 0
        self._facts: set[str] = set()
        self._streams = SideStreams()
        self._outstanding: weakref.WeakSet[OutstandingCall] = weakref.WeakSet()
        self._duplicates: list[TransportCommunicator] = []  # alive until closed: peers wait for their departure
        self.engine.listen_to(self.control)

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        """Carries a schedule to its end in the calling thread."""
        outstanding = self._launch(schedule, facts, timeout, device)
        try:
            self.engine.drive(outstanding, self.transport.nap)
        except BaseException as error:
            outstanding.interrupted(error)
            raise
        return cast(T, outstanding.result())

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        """Starts a schedule, which progresses in the background engine's thread."""
        outstanding = self._launch(schedule, facts, timeout, device)
        if outstanding.device.type == "cuda":
            outstanding.side = self._streams.beside(schedule, outstanding.device)
        self._outstanding.add(outstanding)
        self.engine.add(outstanding)
        return outstanding

    clock = staticmethod(time.perf_counter)

    def native_allreduce(self, tensor: Tensor, *, facts: str) -> Tensor | None:
        """Transport's own sum, if it has one; counted as the 2(P − 1)/P of its bytes that the best algorithms send."""
        if not self.transport.can_sum(tensor):
            return None
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.run(self._native_sum(total), facts=f"native {facts}", timeout=self.timeout, device=tensor.device)
        self.count(2 * total.numel() * total.dtype.itemsize * (self.size - 1) // self.size, messages=1)
        return total

    @property
    def closed(self) -> bool:
        """Whether its transport is closed."""
        return self.control.released

    def close(self) -> None:
        if self.closed:
            return
        self.engine.check_process()
        failed = self.control.abort_reason is not None
        for outstanding in list(self._outstanding):
            if not outstanding.is_over(FAIL_SECONDS if failed else 0.0) and not failed:
                raise RuntimeError("close() while calls that were started are in flight: wait() for them first")
        self.engine.drain(self._is_unsent)
        self.engine.forget(self.control)
        missing = depart([self.control], CLOSED, None if self.control.abort_reason else self.timeout)
        missing = sorted(set(missing) - self.control.lost)  # those have died
        if missing and self.control.abort_reason is None:
            raise TimeoutError(f"rank {self.rank} closed its communicator, but ranks {missing} did not: all ranks must")

    def count(self, nbytes: int = 0, messages: int = 0, *, awaited: Collection[int] = (), seconds: float = 0.0) -> None:
        """Counts bytes and messages that this rank has sent, and seconds for which it lacked messages of peers."""
        with self.control.lock:
            self.bytes_sent += nbytes
            self.messages_sent += messages
            for peer in awaited:
                self._awaited[peer] = self._awaited.get(peer, 0.0) + seconds
        if self.origin is not None:
            self.origin.count(nbytes, messages, awaited=awaited, seconds=seconds)

    @property
    def awaited(self) -> Mapping[int, float]:  # type: ignore[override]
        """Seconds for which calls lacked messages of each peer."""
        with self.control.lock:
            return dict(self._awaited)

    def aside(self, schedule: Schedule[Any], members: Sequence[int], *, facts: str) -> OutstandingCall:
        """Starts a schedule among some ranks, which fails on this one alone; see `Communicator.aside`.

        Tags follow from its facts, so that no message of another one is taken for its own.
        """
        self.engine.check_process()
        schedule, number = among(schedule, members, facts), zlib.crc32(facts.encode())
        call = Call(schedule, rank=self.rank, size=self.size, facts=facts, number=number)
        made = OutstandingCall(self, call, math.inf, CPU, Control(self.transport, alone=True))
        self.engine.add(made)
        return made

    def retire(self) -> None:
        """Closes it as soon as what was sent has gone, in a thread of its own, and waits for nobody."""
        threading.Thread(target=self._retire, name="communicators-retire").start()

    def _is_unsent(self, driven: Driven) -> bool:
        return isinstance(driven, UnsentMessages) and driven.control is self.control

    def _retire(self) -> None:
        end = time.monotonic() + RETIRE_SECONDS
        while self.engine.busy(self._is_unsent) and time.monotonic() < end:
            time.sleep(SPIN_SECONDS)  # and does not drive it: another thread may, where the engine's does not
        self.engine.forget(self.control)
        depart([self.control], CLOSED, 0.0)

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        """Reason for which all its calls fail, None while they do not."""
        return self.control.abort_reason

    @property
    def ended(self) -> set[int]:  # type: ignore[override]
        """The peers that have left, or whose connection is closed; not those that have closed this communicator."""
        left = self.control.departed
        known = left.keys() | set(self.transport.unreachable())
        return {peer for peer in known if left.get(peer) != CLOSED}

    @property
    def gone(self) -> set[int]:
        """The peers whose processes have ended, or cannot be reached; others may meet this rank again."""
        left = self.control.departed
        return {peer for peer in self.control.lost | left.keys() if left.get(peer) != CLOSED}

    def duplicate(self) -> TransportCommunicator:
        return self._duplicated("duplicate", self.transport.duplicate)

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        if self.engine.inline:
            raise RuntimeError(
                "signals come at any time, so another thread must read them, but a transport has threaded=False, as "
                "with an MPI without THREAD_MULTIPLE: it is mpi4py's default, so set neither mpi4py.rc.threads nor "
                "rc.thread_level, or start MPI with it"
            )
        comm = self._duplicated("signals", self.transport.duplicate_for_signals)
        return TransportSignals(comm, comm.control, comm.engine, on_signal)

    def _duplicated(self, what: str, make: Callable[[float], Transport]) -> TransportCommunicator:
        self._duplicates = [made for made in self._duplicates if not made.closed]
        refuse_too_many(len(self._duplicates))
        facts = f"{what} number {self.transport.duplicates}"
        self.run(barrier(self.rank, self.size), facts=facts, timeout=self.timeout, device=CPU)
        transport = make(self.timeout)
        if not isinstance(transport, Transport) or transport is self.transport:
            raise wrong_return(self.transport, "duplicate", transport, "another Transport of the same ranks")
        made = TransportCommunicator(transport, self)
        made.timeout = self.timeout
        self._duplicates.append(made)
        return made

    def _launch(
        self, schedule: Schedule[Any], facts: str, timeout: float, device: torch.device | None
    ) -> OutstandingCall:
        self.engine.check_process()
        if self.control.released or self.control.abort_reason is not None:
            schedule.close()
            self.control.told = True
            raise CollectiveError(self.control.abort_reason or "this communicator is closed")
        device = self.device if device is None else device
        device = with_index(device) if device.type == "cuda" else device
        untagged = device.type == self.transport.untagged
        facts = f"{facts} on {device.type}" if untagged else facts
        with self.control.lock:
            number, new = self._calls, untagged or facts not in self._facts
            self._calls += 1
            self._facts.add(facts)
            prelude = agreement(facts, number, self.rank, self.size) if new else None
            call = Call(schedule, rank=self.rank, size=self.size, facts=facts, number=number, prelude=prelude)
            if untagged:
                self.transport.began(call)
            self.control.called(number, facts)
        return OutstandingCall(self, call, timeout, device, self.control)

    def _native_sum(self, total: Tensor) -> Generator[Any, Received, None]:
        """Native sum behind a barrier: without tags it must meet no other call's, nor wait for a rank that is gone."""
        yield from barrier(self.rank, self.size)
        yield NativeSum(self.transport.post_sum(total))
