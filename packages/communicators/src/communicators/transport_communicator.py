"""The communicator that is built on any transport.

Numbering calls, agreeing on facts, watching the clock, failing alike on all ranks and going on in the background is
the same for every transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from communicators.agreement import agreement
from communicators.call import Call, NativeSum
from communicators.communicator import Communicator, Work
from communicators.control import Control, Letters
from communicators.engine import Engine, engine, part
from communicators.errors import CollectiveError
from communicators.flight import TransportFlight, TransportWork
from communicators.leftover import Leftover
from communicators.schedule import SLOT_BYTES, Received, Round, Schedule, frame, powers_of_two
from communicators.streams import SideStreams, with_index
from communicators.transport import Transport, Unsent

T = TypeVar("T")


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

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        """See `communicators.run`. Progresses in the calling thread."""
        flight = self._launch(schedule, facts, timeout, device)
        self._engine.drive(flight)
        return cast(T, flight.result())

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
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
        facts = f"native allreduce(shape={tuple(tensor.shape)}, {tensor.dtype})"
        self.run(self._native_sum(total), facts=facts, timeout=self.timeout, device=tensor.device)
        self.count(2 * total.numel() * total.dtype.itemsize * (self.size - 1) // self.size, messages=1)
        return total

    def close(self) -> None:
        """See `Communicator.close`."""
        if self.closed:
            return
        self._engine.forget(self)
        self.closed = True
        missing = part([self], "it closed the communicator", None if self.control.verdict else self.timeout)
        if missing and self.control.verdict is None:
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
            for peer in self.transport.unreachable():
                self._write(self.control.lose(peer))

    def complain(self, reason: str) -> None:
        """Tells the arbiter why a collective cannot proceed."""
        with self.lock:
            self._write(self.control.complain(reason))

    def lose(self, peer: int) -> None:
        """This peer cannot be reached any more, or does not answer."""
        with self.lock:
            self._write(self.control.lose(peer))

    def report(self, call: Call, peers: list[int]) -> None:
        """Tells the peers what this rank waits for."""
        with self.lock:
            self._write(self.control.waits(call.number, call.facts, peers))

    def leave(self, why: str) -> None:
        """Says goodbye to all peers."""
        with self.lock:
            self._write(self.control.leaves(why, min(self._under_way, default=self._calls)))

    def sees_through(self, unsent: Unsent) -> bool:
        """Whether the last messages of a call are left to the engine, so that the call is over."""
        return self._engine.see_through(Leftover(self, unsent))

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
        known = {self.rank, *self.control.gone, *self.control.lost}
        others = [rank for rank in range(self.size) if rank not in known]
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
