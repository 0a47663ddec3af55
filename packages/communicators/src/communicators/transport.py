"""What a new world must provide, and the communicator that is built on it.

A transport carries the messages of one round, and short letters beside them. Numbering calls, agreeing on facts,
watching the clock, failing alike on all ranks and going on in the background is the same for every transport.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from communicators import errors
from communicators.agreement import agreement
from communicators.call import Call
from communicators.communicator import TIMEOUT_SECONDS, Communicator, Work
from communicators.control import Control, Letters
from communicators.engine import Engine, engine, part
from communicators.errors import CollectiveError
from communicators.schedule import SLOT_BYTES, Elapse, Received, Round, Schedule, frame, powers_of_two
from communicators.streams import SideStream, SideStreams, owned_here, with_index

T = TypeVar("T")

REPORT_SECONDS = 2.0
"""After so long a rank tells those it waits for what it waits for."""
LEAVE_GRACE_SECONDS = 0.5
"""A message of a peer that has left may still be under way for so long."""
VERDICT_SECONDS = 5.0
"""Where no verdict comes for so long, a rank raises its own reason."""


class PeerLost(Exception):  # noqa: N818 - news, not yet an error: a letter may say why it left
    """The connection to a peer is gone."""

    def __init__(self, peer: int, error: BaseException) -> None:
        super().__init__(peer, error)
        self.peer, self.error = peer, error


class Pending(ABC):
    """Messages under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all are sent and received; does not block. Raises PeerLost."""

    @abstractmethod
    def received(self) -> Received:
        """What came, by peer, once `done`; checks each against the call."""

    @abstractmethod
    def missing(self) -> list[int]:
        """The peers that this rank still waits for."""

    def waits_its_turn(self) -> bool:
        """Whether nothing is under way yet because an earlier call is, whose clock counts."""
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Gives up; buffers that are still in use stay alive."""


class Transport(ABC):
    """Carries rounds and letters between ranks.

    threaded: whether another thread may drive it while the caller computes.
    goodbye_seconds: how long the end of the process waits for other ranks' goodbyes.
    """

    rank: int
    size: int
    device: torch.device
    threaded: bool
    goodbye_seconds: float = math.inf

    @abstractmethod
    def post(self, call: Call, action: Round, device: torch.device) -> Pending:
        """Posts all sends and receives of a round; received payloads are put on `device`."""

    def untagged(self, device: torch.device) -> bool:
        """Whether messages of calls on this device bear no tags.

        Such a call is agreed on by all ranks before its first message, and has the device in its facts: a rank whose
        data lie elsewhere would send another way.
        """
        del device
        return False

    def began(self, call: Call) -> None:  # noqa: B027 - only who has no tags needs it
        """An untagged call is made; in the order of their numbers."""

    def ended(self, call: Call) -> None:  # noqa: B027
        """A call is over, or has failed."""

    @abstractmethod
    def write(self, peer: int, letter: bytes) -> None:
        """Sends a letter (at most control.LETTER_BYTES); does not block."""

    @abstractmethod
    def read(self) -> list[bytes]:
        """The letters that have come; does not block."""

    def nap(self, seconds: float) -> None:
        """Waits so long for messages to come, or less where the transport notices that they have."""
        time.sleep(seconds)

    def can_sum(self, tensor: Tensor) -> bool:
        """Whether the transport has an allreduce of its own for this dtype and device."""
        del tensor
        return False

    def post_sum(self, tensor: Tensor) -> Pending:
        """The transport's own allreduce, in place on a contiguous tensor."""
        raise NotImplementedError(f"{type(self).__name__} has no allreduce of its own")

    def lost(self) -> PeerLost | None:
        """A peer whose connection is gone, where that is noticed while no message of its is under way."""
        return None

    def closing(self) -> bool:
        """Whether letters can still be exchanged."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Releases what would keep the process from ending."""


@dataclass(frozen=True)
class NativeSum:
    """In place of a round: the transport's own sum, posted under the call's number and facts like any other."""

    pending: Pending


class TransportCommunicator(Communicator):
    """A communicator over a transport."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self.device = transport.rank, transport.size, transport.device
        self.transport = transport
        self.bytes_sent = self.messages_sent = 0
        self.control = Control(self.rank, self.size)
        self._calls = 0
        self._under_way: set[int] = set()  # numbers of calls that are not over
        self._facts: set[str] = set()
        self._streams = SideStreams()
        self.lock = threading.RLock()  # the engine's thread listens while the caller's thread calls
        self.closed = self.released = False
        self._engine: Engine = engine()
        self._engine.watch(self)

    def run(
        self, schedule: Schedule[T], *, facts: str, timeout: float = TIMEOUT_SECONDS, device: torch.device | None = None
    ) -> T:
        """See `communicators.run`. Progresses in the calling thread."""
        flight = self._launch(schedule, facts, timeout, device)
        self._engine.drive(flight)
        return cast(T, flight.result())

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float = TIMEOUT_SECONDS, device: torch.device | None = None
    ) -> Work[T]:
        """See `communicators.start`. Progresses in the background engine's thread."""
        device = with_index(device if device is not None else self.device)
        side = self._streams.beside(schedule, device)
        flight = self._launch(schedule, facts, timeout, device)
        flight.side = side
        self._engine.add(flight)
        return TransportWork(flight, self._engine)

    def clock(self) -> float:
        """Seconds, monotonic."""
        return time.perf_counter()

    def native_allreduce(self, tensor: Tensor) -> Tensor | None:
        """See `Communicator.native_allreduce`; counted as the 2(P − 1)/P of its bytes that the best algorithms send."""
        if not self.transport.can_sum(tensor):
            return None
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        facts = f"native allreduce(numel={tensor.numel()}, {tensor.dtype})"
        self.run(self._native_sum(total), facts=facts, device=tensor.device)
        self.count(2 * total.numel() * total.dtype.itemsize * (self.size - 1) // self.size, messages=1)
        return total

    def close(self) -> None:
        """See `Communicator.close`."""
        if self.closed:
            return
        self._engine.forget(self)
        self.closed = True
        if missing := part([self], "it closed the communicator", self.timeout):
            raise TimeoutError(f"rank {self.rank} closed its communicator, but ranks {missing} did not: all ranks must")

    def count(self, nbytes: int, messages: int) -> None:
        """What this rank has sent; rounds are posted by the caller's thread and by the engine's."""
        with self.lock:
            self.bytes_sent += nbytes
            self.messages_sent += messages

    def listen(self) -> None:
        """Reads the letters that have come and writes what follows from them."""
        with self.lock:
            if self.released:
                return
            for letter in self.transport.read():
                self._write(self.control.receive(letter))

    def complain(self, reason: str) -> None:
        """Tells the arbiter why a collective cannot proceed."""
        with self.lock:
            self._write(self.control.complain(reason))

    def report(self, call: Call, peers: list[int]) -> None:
        """Tells the peers what this rank waits for."""
        with self.lock:
            self._write(self.control.waits(call.number, call.facts, peers))

    def leave(self, why: str) -> None:
        """Says goodbye to all peers."""
        with self.lock:
            self._write(self.control.leaves(why, min(self._under_way, default=self._calls)))

    def over(self, call: Call) -> None:
        """A call has ended, or failed."""
        with self.lock:
            self._under_way.discard(call.number)
            self.transport.ended(call)

    def release(self) -> None:
        """Closes the transport, which nobody uses from then on."""
        with self.lock:
            self.released = True
            self.transport.close()

    def staying(self) -> list[int]:
        """The peers that have not said goodbye; none where letters cannot be exchanged any more."""
        others = [rank for rank in range(self.size) if rank != self.rank and rank not in self.control.gone]
        return others if others and self.transport.closing() else []

    def _launch(
        self, schedule: Schedule[Any], facts: str, timeout: float, device: torch.device | None
    ) -> TransportFlight:
        if self.closed or self.control.verdict is not None:
            schedule.close()
            raise CollectiveError(self.control.verdict or "this communicator is closed")
        device = with_index(device if device is not None else self.device)
        untagged = self.transport.untagged(device)
        facts = f"{facts} on {device.type}" if untagged else facts
        with self.lock:
            number, new = self._calls, untagged or facts not in self._facts
            self._calls += 1
            self._under_way.add(number)
            self._facts.add(facts)
            prelude = agreement(facts, number, self.rank, self.size) if new else None
            call = Call(schedule, rank=self.rank, size=self.size, facts=facts, number=number, prelude=prelude)
            if untagged:
                self.transport.began(call)
            self._write(self.control.called(number, facts))
        return TransportFlight(self, call, timeout, device)

    def _native_sum(self, total: Tensor) -> Generator[Any, Received, None]:
        """Sums have no tags; they must meet no other call's, and wait for no rank that is gone: all ranks meet first.

        ⌈log P⌉ tagged rounds of empty messages, in which every rank hears of every other.
        """
        for distance in powers_of_two(below=self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            yield Round({to: frame(torch.empty(0))}, {source: SLOT_BYTES})
        yield NativeSum(self.transport.post_sum(total))

    def _write(self, letters: Letters) -> None:
        for peer, letter in letters:
            self.transport.write(peer, letter)


class TransportFlight:
    """A call under way over a transport: polled to its end, by the caller or by the engine.

    progressed: when its current round was posted, by time.monotonic().
    device: where received payloads are put. side: its own stream there, where it has one.
    """

    def __init__(self, comm: TransportCommunicator, call: Call, timeout: float, device: torch.device) -> None:
        self.comm, self.call = comm, call
        self.finished = threading.Event()
        self.error: CollectiveError | None = None
        self.device, self.side = device, cast(SideStream | None, None)
        self._timeout = timeout
        self._stepped_through = False
        self.peers: list[int] = []  # of the current round
        self._pending: Pending | None = None
        self._cause: BaseException | None = None
        self._reason: str | None = None
        self._lost: PeerLost | None = None
        self._reported = False
        self._callbacks: list[Callable[[], None]] = []
        self.progressed = self._turn_came = time.monotonic()

    def poll(self) -> bool:
        """Goes on as far as it can without blocking; True at the end."""
        if self.side is None:
            return self._poll()
        try:
            with self.side.current():
                return self._poll()
        except Exception as error:  # the GPU itself has failed: without it the flight can still say so
            self.side = None
            self._complain(errors.failed(self.comm.rank, self.call.facts, error), error)
            return self._poll()

    def _poll(self) -> bool:
        try:
            if self._reason is None and self.comm.control.verdict is None and self._advance():
                self._finish()
                return True
        except PeerLost as lost:
            self._lost = self._lost or lost  # `watch` complains, unless a letter has said why
        except Exception as error:
            self._complain(errors.reason(self.comm.rank, self.call.facts, error), error)
        return self._failed()

    def watch(self) -> None:
        """Looks at the clock; called every few milliseconds while a poll finds nothing."""
        if self._pending is not None and self._pending.waits_its_turn():
            self._turn_came = time.monotonic()
        waited = time.monotonic() - max(self.progressed, self._turn_came)
        if self._reason is not None or self._pending is None or waited < LEAVE_GRACE_SECONDS:
            return
        missing, control = self._pending.missing(), self.comm.control
        waiting = errors.waits(self.comm.rank, self.call.number, self.call.facts, self.call.turn, missing)
        if lost := control.deserters(self.call.number, missing):
            self._complain(errors.left(lost[0], control.gone[lost[0]], waiting))
        elif self._lost is not None:  # no word of who noticed: if the arbiter is gone, every rank says this by itself
            self._complain(f"rank {self._lost.peer} is gone: its connection was lost", self._lost.error)
        elif waited > self._timeout:
            self._complain(f"timed out after {self._timeout:g} s: {waiting}")
        elif waited > REPORT_SECONDS and not self._reported:
            self._reported = True
            self.comm.report(self.call, missing)

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Calls back at the end, or at once if that has been."""
        with self.comm.lock:
            if not self.finished.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def abandon(self) -> None:
        """Nobody will ask for it any more: at exit, or after a signal."""
        if self._pending is not None:
            self._pending.cancel()

    def interrupted(self, error: BaseException) -> None:
        """A signal came while its rank waited: later calls would be out of step, so it ends on all ranks."""
        self.abandon()
        self.comm.complain(errors.failed(self.comm.rank, self.call.facts, error))

    def result(self) -> Any:
        """The schedule's result, or its error."""
        if self.error is not None:
            raise CollectiveError(str(self.error)) from self._cause
        return self.call.value

    def _advance(self) -> bool:
        received: Received = {}
        while not self._stepped_through:
            if self._pending is not None:
                if not self._pending.done():
                    return False
                received, self._pending = self._pending.received(), None
            action = self.call.step(received)
            received = {}
            if action is None:
                self._stepped_through = True
            elif not isinstance(action, Elapse):
                self._post(action)
        if self.side is not None and not self.side.is_idle():
            return False
        self.call.settle()
        return True

    def _post(self, action: Round | NativeSum) -> None:
        if isinstance(action, NativeSum):
            self._pending = action.pending
        else:
            device = self.device if self.call.counted else torch.device("cpu")  # an agreement is read by the host
            self._pending = self.comm.transport.post(self.call, action, device)
            self.peers = sorted({*action.sends, *action.recvs})
            if self.call.counted:
                self.comm.count(sum(payload.numel() for payload in action.sends.values()), len(action.sends))
        self.progressed, self._reported = time.monotonic(), False

    def _complain(self, reason: str, cause: BaseException | None = None) -> None:
        self._reason, self._cause = reason, cause
        self.progressed = time.monotonic()
        self.comm.complain(reason)

    def _failed(self) -> bool:
        """Ends with the verdict once there is one; a rank that complained waits for it."""
        control = self.comm.control
        if control.verdict is None and self._reason is not None:
            if time.monotonic() - self.progressed < VERDICT_SECONDS:
                return False
            control.verdict = self._reason
        if control.verdict is None:
            return False
        self.error = CollectiveError(control.verdict)
        if self._pending is not None:
            self._pending.cancel()
        self.call.close()
        self._finish()
        return True

    def _finish(self) -> None:
        self.comm.over(self.call)
        with self.comm.lock:
            self.finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class TransportWork(Work[T]):
    """A started call; the engine drives it."""

    def __init__(self, flight: TransportFlight, engine: Engine) -> None:
        self._flight, self._engine = flight, engine

    def wait(self, timeout: float | None = None) -> T:
        """See `Work.wait`."""
        if not self._engine.wait(self._flight, timeout):
            call = self._flight.call
            waiting = errors.waits(call.rank, call.number, call.facts, call.turn, self._flight.peers)
            raise TimeoutError(f"not completed within {timeout} s: {waiting}")
        result = cast(T, self._flight.result())
        return result if self._flight.side is None else owned_here(result, self._flight.device)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._engine.wait(self._flight, 0.0)

    def get_future(self) -> torch.futures.Future[T]:
        """See `Work.get_future`."""
        return self._engine.future(self._flight)
