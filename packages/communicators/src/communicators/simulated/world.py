"""A world in one process: deterministic, with a virtual clock that charges α + β·bytes per message.

One event loop in the caller's thread. Each rank is a thread, but only the one that holds the baton runs, and it gives
the baton back in communicator calls alone; schedules are advanced by the loop itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from communicators.communicator import Communicator, Work, refuse_too_many
from communicators.errors import CollectiveError
from communicators.link import Link
from communicators.schedule import Schedule
from communicators.schedules.dense import allgather, barrier
from communicators.signals import OnSignal, Signals
from communicators.simulated.event_loop import EventLoop
from communicators.simulated.faults import Corrupts, Dies
from communicators.simulated.generators import OwnGenerator
from communicators.simulated.signals import SimulatedSignals
from communicators.simulated.signals_in_flight import Context
from communicators.simulated.subgroup import SimulatedSubgroup
from communicators.simulated.waiting import SimulatedCall

T = TypeVar("T")

POLL_SECONDS = 50e-6
"""Virtual cost of one `is_completed()`."""


class SimulatedWorld:
    """Ranks 0 … size − 1, joined pairwise by equal links. Data may be on any device, and stay there.

    Args:
        size: Number of ranks.
        link: Seconds per message and per byte.
        seed: Draws the order of events that happen at the same virtual time.
        slowdown: Per rank, a factor on the time of its computation (`comm.elapse`, `Elapse`); default 1 each.
        jitter: Most seconds that are added to each message, drawn like the order.
        draw: Returns numbers in [0, 1) for order and jitter, in place of `seed`; hypothesis can drive it.
        faults: `Dies` and `Corrupts`.
        own_generators: Gives each rank torch's global generator on the CPU to itself, as a process has it, seeded by
            `seed` and its rank; so dropout on a rank does not depend on which ranks ran before, and a rank may call
            `torch.manual_seed`. False: all ranks draw from the caller's, in the order in which they run; then give
            what draws a `torch.Generator` of its own. Generators of other devices are shared in any case.

    Attributes:
        bytes_sent: Bytes that each rank sent in counted rounds of the last `run`.
        messages_sent: Messages that held them, of each rank.
        elapsed: Virtual seconds that the run took.
    """

    def __init__(
        self,
        size: int,
        link: Link | None = None,
        seed: int = 0,
        *,
        slowdown: Sequence[float] | None = None,
        jitter: float = 0.0,
        draw: Callable[[], float] | None = None,
        faults: Iterable[Dies | Corrupts] = (),
        own_generators: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least 1 rank, got size={size}")
        if slowdown is not None and len(slowdown) != size:
            raise ValueError(f"slowdown names {len(slowdown)} factors, expected one for each of {size} ranks")
        self.size, self.seed, self.jitter = size, seed, jitter
        self.link = link if link is not None else Link()
        self.slowdown = tuple(slowdown) if slowdown is not None else (1.0,) * size
        self.elapsed = 0.0
        self.bytes_sent = [0] * size
        self.messages_sent = [0] * size
        self._draw, self.own_generators = draw, own_generators
        faults = list(faults)
        self.deaths = [(f.rank, f.at) for f in faults if isinstance(f, Dies) and f.at is not None]
        self._faults = {(f.rank, f.message): f for f in faults if isinstance(f, Corrupts) or f.at is None}

    def run(self, fn: Callable[[SimulatedCommunicator], T]) -> list[T]:
        """Runs fn(comm) on every rank and returns the results in rank order (None for a rank that died).

        An exception on one rank fails the others' collectives and is raised here. Counts start again at each run.

        Args:
            fn: Function of a rank; `comm` says which one it is.
        """
        loop = EventLoop(self, self._draw if self._draw is not None else random.Random(self.seed).random)
        self.bytes_sent, self.messages_sent = loop.bytes_sent, loop.messages_sent
        comms = [SimulatedCommunicator(loop, rank) for rank in range(self.size)]
        try:
            return loop.run([lambda comm=comm: fn(comm) for comm in comms])  # type: ignore[misc]
        finally:
            self.elapsed = loop.now

    def fault(self, rank: int, message: int) -> Dies | Corrupts | None:
        """Fault of this message of this rank, if any."""
        return self._faults.get((rank, message))

    def turn(self, rank: int) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context that each turn of this rank's thread is inside of."""
        return OwnGenerator(self.seed, rank).lent if self.own_generators else nullcontext


class SimulatedCommunicator(Communicator):
    """One rank's view of a simulated world. Its bytes and messages are those of all communicators of the rank."""

    outlives_ranks = True

    def __init__(self, loop: EventLoop, rank: int, context: Context = ()) -> None:
        self._loop, self._context = loop, context
        self.rank, self.size = rank, loop.world.size
        self._duplicates: list[SimulatedCommunicator] = []
        self._made, self._closed = 0, False

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes that this rank sent so far."""
        return self._loop.bytes_sent[self.rank]

    @property
    def messages_sent(self) -> int:  # type: ignore[override]
        """Messages that this rank sent so far."""
        return self._loop.messages_sent[self.rank]

    def run(self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None) -> T:
        """Carries a schedule to its end; the timeout counts virtual seconds."""
        return self.start(schedule, facts=facts, timeout=timeout, device=device).wait()

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> SimulatedWork[T]:
        """Starts a schedule, which advances in virtual time while its rank computes or waits."""
        del device
        if self._closed:
            schedule.close()
            raise CollectiveError("this communicator is closed")
        outstanding = self._loop.submit(self.rank, schedule, facts, timeout, self._context)
        return SimulatedWork(self._loop, self.rank, outstanding)

    def duplicate(self) -> SimulatedCommunicator:
        self._duplicates = [made for made in self._duplicates if not made._closed]
        refuse_too_many(len(self._duplicates))
        facts = f"duplicate number {self._made}"
        self.run(barrier(self.rank, self.size), facts=facts, timeout=self.timeout)
        made = self.inner()
        self._duplicates.append(made)
        return made

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        """Signals of a duplicate; the loop calls `on_signal` between the turns of ranks."""
        beside = self.duplicate()
        return SimulatedSignals(self._loop, beside, beside._context, on_signal)

    def split(self, color: int) -> SimulatedSubgroup:
        """A communicator of the ranks that give the same color, in their order, as MPI's Split. Collective."""
        schedule = allgather(torch.tensor([color]), self.rank, self.size)
        colors = [int(given) for given in self.run(schedule, facts="split", timeout=self.timeout)]
        self._made += 1
        context = (*self._context, self._made - 1, sorted(set(colors)).index(color))
        whole = SimulatedCommunicator(self._loop, self.rank, context)
        whole.timeout = self.timeout
        return SimulatedSubgroup(whole, [rank for rank, given in enumerate(colors) if given == color])

    def inner(self) -> SimulatedCommunicator:
        """Another communicator of the same world, for a duplicate, or for a group in it that makes as many."""
        self._made += 1
        made = SimulatedCommunicator(self._loop, self.rank, (*self._context, self._made - 1))
        made.timeout = self.timeout
        return made

    def close(self) -> None:
        self._closed = True

    def clock(self) -> float:
        """Virtual seconds since the run began."""
        return self._loop.now

    def elapse(self, seconds: float) -> None:
        """Computes for `seconds` of virtual time, times this rank's slowdown."""
        self._loop.sleep(self.rank, seconds * self._loop.world.slowdown[self.rank])


class SimulatedWork(Work[T]):
    """A started call; waiting for it, or for its futures, lets the other ranks go on."""

    def __init__(self, loop: EventLoop, rank: int, outstanding: SimulatedCall) -> None:
        self._loop, self._rank, self._outstanding = loop, rank, outstanding

    @property
    def began(self) -> float:
        """Start of the call in virtual seconds."""
        return self._outstanding.began

    @property
    def ended(self) -> float | None:
        """Time of its result or error in virtual seconds; None until then."""
        return self._outstanding.ended if self._outstanding.done else None

    @property
    def bytes_sent(self) -> int:
        return self._outstanding.bytes_sent

    @property
    def error(self) -> CollectiveError | None:
        return self._outstanding.error

    def when_over(self, callback: Callable[[], None]) -> None:
        """Calls back from the loop, between the turns of ranks, once there is a result or an error."""
        self._loop.wish(lambda: self._outstanding.when_over(callback))

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the result, and returns it; the timeout counts virtual seconds."""
        self._loop.wait(self._rank, self._outstanding, timeout)
        error = self._outstanding.error
        if error is not None:
            raise CollectiveError(str(error)) from error.__cause__
        result: T = self._outstanding.call.value
        return result

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once; costs POLL_SECONDS."""
        self._loop.sleep(self._rank, POLL_SECONDS)
        return self._outstanding.done

    def get_future(self) -> torch.futures.Future[T]:
        return _SimulatedFuture(self.wait)


class _SimulatedFuture(torch.futures.Future[T]):
    """Completes when somebody waits for it: in a simulated world nothing happens in between."""

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()
        self._compute = compute

    def wait(self) -> T:
        if not self.done():
            self.set_result(self._compute())
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        def after() -> Any:
            self.wait()
            return callback(self)

        return _SimulatedFuture(after)
