"""Communicator over any transport.

Numbering calls, agreeing on facts, watching the clock, failing alike on all ranks and going on in the background is
the same for every transport.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from communicators import errors
from communicators.background.call import Call, NativeSum, agreement
from communicators.background.engine import FAILED_DEPARTURE_SECONDS, depart, engine
from communicators.background.outstanding_call import DetachedSends, OutstandingCall
from communicators.background.signals import Signalling, TransportSignals
from communicators.background.streams import SideStreams, with_index
from communicators.background.transport import Pending, Transport
from communicators.communicator import Work, refuse_too_many
from communicators.errors import CollectiveError
from communicators.schedule import Received, Schedule
from communicators.schedules.dense import barrier
from communicators.signals import OnSignal, Signals

T = TypeVar("T")

CLOSED = "it closed the communicator"
FAIL_SECONDS = 10.0
"""Upper bound on the end of a call in flight on a failed communicator, which comes much sooner."""


class TransportCommunicator(Signalling):
    """A communicator over a transport."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport, engine())
        self.device = transport.device
        self.bytes_sent = self.messages_sent = 0
        self.origin: TransportCommunicator | None = None  # whose duplicate this is
        self._calls = 0
        self._in_flight: set[int] = set()  # numbers of calls that are not over
        self._facts: set[str] = set()
        self._streams = SideStreams()
        self.closed = False
        self._outstanding: weakref.WeakSet[OutstandingCall] = weakref.WeakSet()
        self._duplicates: list[TransportCommunicator] = []  # alive until closed: peers wait for their departure
        self.threaded, self.outlives_ranks = transport.threaded, transport.outlives_ranks
        self.engine.listen_to(self)

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        """Carries a schedule to its end in the calling thread."""
        outstanding = self._launch(schedule, facts, timeout, self._device(device))
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
        device = self._device(device)
        side = None if device.type != "cuda" else self._streams.beside(schedule, device)
        outstanding = self._launch(schedule, facts, timeout, device)
        outstanding.side = side
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

    def close(self) -> None:
        if self.closed:
            return
        self._end_outstanding()
        self.engine.drain(lambda driven: isinstance(driven, DetachedSends) and driven.control is self.control)
        self.engine.forget(self)
        self.closed = True
        missing = depart([self], CLOSED, None if self.control.abort_reason else self.timeout)
        missing = sorted(set(missing) - self.control.lost)  # those have died
        if missing and self.control.abort_reason is None:
            raise TimeoutError(f"rank {self.rank} closed its communicator, but ranks {missing} did not: all ranks must")

    def count(self, nbytes: int, messages: int) -> None:
        with self.lock:
            self.bytes_sent += nbytes
            self.messages_sent += messages
        if self.origin is not None:
            self.origin.count(nbytes, messages)

    def listen(self) -> None:
        """Reads the control messages that have come and writes what follows from them."""
        with self.lock:
            if self.released:
                return
            for message in self.transport.read_control():
                self._write(self.control.receive(message))
            for peer in set(self.transport.unreachable()) - self.control.lost:
                self._write(self.control.lose(peer))

    def depart(self, why: str) -> None:
        with self.lock:
            self._write(self.control.departs(why, min(self._in_flight, default=self._calls)))

    def detaches(self, unsent: list[Pending]) -> bool:
        detached = DetachedSends(self.control, unsent)
        if detached.advance():
            return True
        if not self.engine.drives:
            return False
        self.engine.add(detached)
        return True

    def over(self, call: Call) -> None:
        with self.lock:
            self._in_flight.discard(call.number)
            if self.transport.untagged is not None:
                self.transport.ended(call)

    def release(self) -> None:
        """Closes the transport, which nobody uses from then on."""
        with self.lock:
            self.released = self.closed = True
            self.transport.close()

    @property
    def gone(self) -> set[int]:
        """The peers whose processes have ended, or cannot be reached; others may meet this rank again."""
        left = self.control.departed
        return {peer for peer in self.control.lost | left.keys() if left.get(peer) != CLOSED}

    def missing(self) -> list[int]:
        """The peers that have not departed."""
        return sorted(set(range(self.size)) - {self.rank, *self.control.departed})

    def awaited(self) -> list[int]:
        """Peers that may still depart; none where control messages cannot be exchanged any more."""
        others = sorted(set(self.missing()) - self.control.lost)
        return others if others and self.transport.closing() else []

    def departure_seconds(self) -> float:
        """Longest wait for the peers' departure: a peer that does not answer after a failure may never do so."""
        usual = self.transport.departure_seconds
        return usual if self.control.abort_reason is None else min(usual, FAILED_DEPARTURE_SECONDS)

    def fail(self, error: BaseException) -> None:
        """Fails the communicator, whose transport has failed on this rank."""
        self.control.abort_reason = (
            self.control.abort_reason or f"rank {self.rank}'s transport failed: {errors.describe(error)}"
        )

    def duplicate(self) -> TransportCommunicator:
        return self._duplicated("duplicate", self.transport.duplicate)

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        if self.engine.inline:
            raise RuntimeError(
                "signals come at any time, so another thread must read them, but this MPI was not initialised with "
                "THREAD_MULTIPLE: it is mpi4py's default, so set neither mpi4py.rc.threads nor rc.thread_level, or "
                "start MPI with it"
            )
        comm = self._duplicated("signals", self.transport.duplicate_for_signals)
        return TransportSignals(comm, on_signal)

    def _duplicated(self, what: str, make: Callable[[float], Transport]) -> TransportCommunicator:
        self._duplicates = [made for made in self._duplicates if not made.closed]
        refuse_too_many(len(self._duplicates))
        facts = f"{what} number {self.transport.duplicates}"
        self.run(barrier(self.rank, self.size), facts=facts, timeout=self.timeout, device=torch.device("cpu"))
        made = TransportCommunicator(make(self.timeout))
        made.timeout = self.timeout
        self._duplicates.append(made)
        made.origin = self
        return made

    def _end_outstanding(self) -> None:
        """Waits for calls that have failed; RuntimeError while others that were started are in flight."""
        for outstanding in list(self._outstanding):
            failing = self.control.abort_reason is not None
            if not self.engine.wait(outstanding.finished, FAIL_SECONDS if failing else 0.0) and not failing:
                raise RuntimeError("close() while calls that were started are in flight: wait() for them first")

    def _launch(self, schedule: Schedule[Any], facts: str, timeout: float, device: torch.device) -> OutstandingCall:
        if self.closed or self.control.abort_reason is not None:
            schedule.close()
            self.control.told = True
            raise CollectiveError(self.control.abort_reason or "this communicator is closed")
        untagged = device.type == self.transport.untagged
        facts = f"{facts} on {device.type}" if untagged else facts
        with self.lock:
            number, new = self._calls, untagged or facts not in self._facts
            self._calls += 1
            self._in_flight.add(number)
            self._facts.add(facts)
            prelude = agreement(facts, number, self.rank, self.size) if new else None
            call = Call(schedule, rank=self.rank, size=self.size, facts=facts, number=number, prelude=prelude)
            if untagged:
                self.transport.began(call)
            self._write(self.control.called(number, facts))
        return OutstandingCall(self, call, timeout, device)

    def _device(self, device: torch.device | None) -> torch.device:
        device = self.device if device is None else device
        return with_index(device) if device.type == "cuda" else device

    def _native_sum(self, total: Tensor) -> Generator[Any, Received, None]:
        """Native sum behind a barrier: without tags it must meet no other call's, nor wait for a rank that is gone."""
        yield from barrier(self.rank, self.size)
        yield NativeSum(self.transport.post_sum(total))
