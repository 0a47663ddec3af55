"""A world in one process: deterministic, with a virtual clock that charges α + β·bytes per message.

One event loop in the caller's thread. Each rank is a thread, but only the one that holds the baton runs, and it gives
the baton back in communicator calls alone; schedules are advanced by the loop itself.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path as FilePath
from typing import TypeVar

import torch

from communicators.communicator import Communicator, Work, refuse_too_many
from communicators.errors import CollectiveError
from communicators.link import Link, Path
from communicators.schedule import Elapse, Schedule, among
from communicators.schedules.dense import allgather, barrier
from communicators.signals import OnSignal, Signals
from communicators.simulated.board import SimulatedBoard
from communicators.simulated.event_loop import EventLoop
from communicators.simulated.network import BoardLost, Conditions, Corrupts, Dies, LinkLost
from communicators.simulated.ranks import Context, OwnGenerator
from communicators.simulated.signals import SimulatedSignals
from communicators.simulated.timeline import Timeline

T = TypeVar("T")


class SimulatedWorld:
    """Ranks 0 … size − 1, joined pairwise by links. Data may be on any device, and stay there.

    Ranks are threads of this process: make what keeps a state, such as a stateful compressor, on each of them.

    Args:
        size: Number of ranks.
        link: Seconds per message and per byte, of equal links; or (source, target) -> `Path` of unequal ones;
            of a rank with itself, too. A port has one message at a time, its delay included.
        seed: Draws the order of events that happen at the same virtual time.
        slowdown: Per rank, a factor on the time of its computation (`comm.elapse`, `Elapse`); default 1 each.
        jitter: Most seconds that are added to each message, drawn like the order.
        draw: Returns numbers in [0, 1) for order and jitter, in place of `seed`; hypothesis can drive it.
        faults: `Dies`, `Corrupts`, `LinkLost` and `BoardLost`.
        own_generators: Gives each rank torch's global generator on the CPU to itself, as a process has it, seeded by
            `seed` and its rank; so dropout on a rank does not depend on which ranks ran before, and a rank may call
            `torch.manual_seed`. False: all ranks draw from the caller's, in the order in which they run; then give
            what draws a `torch.Generator` of its own. Generators of other devices are shared in any case, and the CPU's
            by worlds that run at once, in threads.
        records: Keeps a timeline of each `run`, for `write_trace`: memory for each message.

    Attributes:
        bytes_sent: Bytes that each rank sent in counted rounds of the last `run`.
        messages_sent: Messages that held them, of each rank.
        elapsed: Virtual seconds that the run took.
        records: Whether a timeline is kept.
        timeline: Spans of ranks and messages of the last `run`, in virtual seconds.
    """

    def __init__(
        self,
        size: int,
        link: Link | Callable[[int, int], Path] | None = None,
        seed: int = 0,
        *,
        slowdown: Sequence[float] | None = None,
        jitter: float = 0.0,
        draw: Callable[[], float] | None = None,
        faults: Iterable[Dies | Corrupts | BoardLost | LinkLost] = (),
        own_generators: bool = False,
        records: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least 1 rank, got size={size}")
        if slowdown is not None and (len(slowdown) != size or not all(0 <= factor < math.inf for factor in slowdown)):
            raise ValueError(f"slowdown names {slowdown}, expected a finite factor >= 0 for each of {size} ranks")
        if not 0 <= jitter < math.inf:
            raise ValueError(f"a world needs a finite jitter >= 0 s, got {jitter}")
        self.size, self.elapsed = size, 0.0
        self.bytes_sent, self.messages_sent = [0] * size, [0] * size
        self._draw, self._seed, self._own_generators = draw, seed, own_generators
        self.records, self.timeline = records, Timeline(size)
        faults = list(faults)
        for fault in faults:
            ranks = {getattr(fault, "rank", 0), getattr(fault, "peer", None)} - {None}
            if not ranks <= set(range(size)):
                raise ValueError(f"{fault} names a rank that is none of {size}, so it would never happen")
        self._conditions = Conditions(
            size,
            link if callable(link) else _equal(link or Link()),
            tuple(slowdown) if slowdown is not None else (1.0,) * size,
            jitter,
            deaths=[(f.rank, f.at) for f in faults if isinstance(f, Dies) and f.at is not None],
            faults={
                (f.rank, f.message): f
                for f in faults
                if isinstance(f, Corrupts) or (isinstance(f, Dies) and f.at is None)
            },
            outages=[(f.at, f.at + f.seconds) for f in faults if isinstance(f, BoardLost)],
            dark=[f for f in faults if isinstance(f, LinkLost)],
        )

    def run(self, fn: Callable[[SimulatedCommunicator], T]) -> list[T]:
        """Runs fn(comm) on every rank and returns the results in rank order (None for a rank that died).

        An exception on one rank fails the others' collectives and is raised here. Counts start again at each run.

        Args:
            fn: Function of a rank; `comm` says which one it is.
        """
        turns = [
            OwnGenerator(self._seed, rank).lent if self._own_generators else nullcontext for rank in range(self.size)
        ]
        loop = EventLoop(self._conditions, self._draw or random.Random(self._seed).random, turns)
        self.bytes_sent, self.messages_sent = loop.bytes_sent, loop.messages_sent
        if self.records:
            self.timeline = loop.timeline = Timeline(self.size)
        comms = [SimulatedCommunicator(loop, rank) for rank in range(self.size)]
        try:
            return loop.run([lambda comm=comm: fn(comm) for comm in comms])  # type: ignore[misc]
        finally:
            self.elapsed = loop.now

    def write_trace(self, path: str | FilePath) -> None:
        """Writes what the last `run` did, in virtual time: see `tracing.write_trace`.

        Args:
            path: The file, JSON in the trace event format.

        Raises:
            ValueError: The world does not record.
        """
        if not self.records:
            raise ValueError("a SimulatedWorld without records has no timeline: make it with records=True")
        FilePath(path).write_text(json.dumps(self.timeline.trace()))


def _equal(link: Link) -> Callable[[int, int], Path]:
    path = Path(link.alpha, link.beta, link.beta)
    return lambda source, target: path


class SimulatedCommunicator(Communicator):
    """One rank's view of a simulated world, or of some of its ranks. Counts are those of all its communicators.

    place: this rank in the world. context: name of the communicator in the loop. members: `places` of its ranks in the
    world, in order, where it is not all of them; inside, they count from 0. Errors name ranks of the world.
    """

    outlives_ranks = True

    def __init__(
        self, loop: EventLoop, place: int, context: Context = (), members: Sequence[int] | None = None
    ) -> None:
        self.loop, self.context, self.place, self._members = loop, context, place, members
        self.places = range(loop.world.size) if members is None else members
        self.rank, self.size = self.places.index(place), len(self.places)
        self._duplicates: list[SimulatedCommunicator] = []
        self._made, self._closed = 0, False

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """Bytes that this rank sent so far."""
        return self.loop.bytes_sent[self.place]

    @property
    def messages_sent(self) -> int:  # type: ignore[override]
        """Messages that this rank sent so far."""
        return self.loop.messages_sent[self.place]

    @property
    def awaited(self) -> Mapping[int, float]:  # type: ignore[override]
        """Seconds for which messages of each peer were awaited so far."""
        seconds = self.loop.awaited[self.place]
        return {peer: seconds[place] for peer, place in enumerate(self.places) if place in seconds}

    def start(
        self, schedule: Schedule[T], *, facts: str, timeout: float, device: torch.device | None = None
    ) -> Work[T]:
        if self._closed:
            schedule.close()
            raise CollectiveError("this communicator is closed")
        if self._members is not None:
            schedule = among(schedule, self._members, facts)
        return self.loop.submit(self.place, schedule, facts, timeout, self.context, self.places)

    def duplicate(self) -> SimulatedCommunicator:
        self._duplicates = [made for made in self._duplicates if not made._closed]
        refuse_too_many(len(self._duplicates))
        facts = f"duplicate number {self._made}"
        self.run(barrier(self.rank, self.size), facts=facts, timeout=self.timeout)
        made = self._inner((), self._members)
        self._duplicates.append(made)
        return made

    def signals(self, on_signal: OnSignal | None = None) -> Signals:
        """Signals of a duplicate; the loop calls `on_signal` between the turns of ranks."""
        made = self.duplicate()
        return SimulatedSignals(made, self.loop, made.context, self.places, on_signal, hasty=self.hasty)

    def split(self, color: int) -> SimulatedCommunicator:
        """A communicator of the ranks that give the same color, in their order, as MPI's Split. Collective."""
        schedule = allgather(torch.tensor([color], device="cpu"), self.rank, self.size)
        colors = [int(given) for given in self.run(schedule, facts="split", timeout=self.timeout)]
        members = [place for place, given in zip(self.places, colors, strict=True) if given == color]
        return self._inner((sorted(set(colors)).index(color),), members)

    def aside(self, schedule: Schedule[T], members: Sequence[int], *, facts: str) -> Work[T]:
        places = [self.places[member] for member in members]
        context = (*self.context, zlib.crc32(facts.encode()))
        self.loop.groups[context] = frozenset(places)
        return self.loop.submit(self.place, among(schedule, places, facts), facts, math.inf, context, self.places)

    def board(self, name: str) -> SimulatedBoard:
        return SimulatedBoard(self.loop, self.place, self.loop.boards.setdefault(name, {}), self._of_generation)

    def _of_generation(self, generation: int, places: Sequence[int]) -> SimulatedCommunicator:
        """Communicator of an elastic group's ranks, which only the end of one of them ends."""
        context = (*self.context, -1, generation)
        self.loop.groups[context] = frozenset(places)
        made = SimulatedCommunicator(self.loop, self.place, context, places)
        made.hasty = True
        return made

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        """Reason for which all its calls fail, None while they do not."""
        poison = self.loop.poisoned(self.context)
        return None if poison is None else str(poison)

    @property
    def ended(self) -> list[int]:  # type: ignore[override]
        """Ranks that have ended."""
        return [self.places.index(place) for place in self.loop.ended if place in self.places]

    def close(self) -> None:
        self._closed = True

    def clock(self) -> float:
        """Virtual seconds since the run began."""
        return self.loop.now

    def elapse(self, seconds: float) -> None:
        """Computes for `seconds` of virtual time, times this rank's slowdown."""
        self.loop.compute(self.place, Elapse(seconds).seconds * self.loop.world.slowdown[self.place])

    def _inner(self, which: tuple[int, ...], members: Sequence[int] | None) -> SimulatedCommunicator:
        self._made += 1
        made = SimulatedCommunicator(self.loop, self.place, (*self.context, self._made - 1, *which), members)
        made.timeout = self.timeout
        return made
