"""A day of 256 simulated machines in homes: how much of their computing DiLoCo keeps, plain and with all that helps.

    python -m bench wide-area-day [--ranks P] [--hours H] [--seeds N] [--full] [--output DIR]

Each machine has drawn rates, delay and speed: see `drawn`. A block is 500 steps of about 5 s; some steps hang, a
machine is slow for an hour at times, and dies, half of the time without a word; another one comes in its place after 15
minutes.
goodput: computing of steps that are in a mean, of what all machines would do that never wait, are late or die. tokens:
millions an hour, 4,096 a step. deaths, joined: machines that have died, and that have come. rounds: means a day.

The optimizers, rounds, membership and the state of newcomers are the packages' own, by messages in virtual time over
a port each. Not real: every parameter of the model stands for a share of PARAMETERS, LOOK steps pass as one, and a
sum's bytes go to one neighbour in pieces, before all wait for the slowest; small messages wait behind such a piece,
as they would not for long in TCP; who waits looks at the board every ten seconds, and asks a silent rank once in a
time-out whether it lives. Rounding itself is left out, its bytes are not; nothing is learnt, for which see `bench
wide-area-learning`.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from communicators import Dies, Elastic, LeftOutError, LinkLost, Path, Payload, Round, SimulatedWorld, schedules
from communicators.elastic import membership, transfer
from communicators.schedule import SLOT_BYTES
from communicators.schedules.quantised import Rounded
from communicators.simulated.world import SimulatedCommunicator
from local_sgd import DiLoCo, StreamingDiLoCo
from partial_collectives import PartialAllreduce, pulse
from slow_link import Port
from slow_link.simulated import paths_of
from torch import Tensor, nn

from bench.elastic_cluster import Life
from bench.record import asked, parser_of, record
from bench.troubles import Troubles, slow_ones, step_seconds, untold

PARAMETERS, STATE_BYTES, TOKENS = 125e6, 20, 4096
"""Of the model; a newcomer gets of each 20 bytes: weight, anchor, outer momentum, Adam's two."""
NUMEL, PIECE_BYTES, STATE_CHUNK, GIVE = 64, 10e6, 9, transfer.give
"""Elements of each of the simulated model's four tensors; most bytes of a sum's pieces."""
EVERY, LOOK = 500, 5
FOREVER = 1e9
SHOWN = ("way", "goodput", "tokens", "rounds", "deaths", "joined")


@dataclass(frozen=True)
class Machine:
    """Machine with its port. slowness: seconds of its steps, of those of a usual one."""

    port: Port
    slowness: float
    life: Life
    troubles: Troubles

    @property
    def usual(self) -> float:
        """Seconds of its step where nothing is amiss."""
        return self.slowness * self.troubles.step

    def seconds(self, steps: int, draw: np.random.Generator) -> Callable[[float], float]:
        """Draws the seconds of its next steps, by the time."""
        slow = slow_ones(self.troubles, 1, draw)
        return lambda now: self.slowness * float(step_seconds(self.troubles, slow(now).repeat(steps), draw).sum())

    def faults(self, place: int) -> list[Dies | LinkLost]:
        """Its death, in a simulated world."""
        if math.isinf(self.life.dies):
            return []
        if self.life.dark:
            return [LinkLost(place, None, at=self.life.dies, seconds=FOREVER)]
        return [Dies(place, at=self.life.dies)]


def drawn(ranks: int, end: float, seed: int, troubles: Troubles) -> list[Machine]:
    """Machines that train at first, and all that come until the end in the place of one that died.

    Rates and delays are log-uniform: 5 to 100 Mbit/s up, 50 to 500 down, 5 to 50 ms; the speed is log-normal, by 20 %.
    """
    draw, machines, begins = np.random.default_rng(seed), list[Machine](), [0.0] * ranks
    while begins:
        new = [_machine(begin, end, draw, troubles) for begin in begins]
        machines += new
        begins = [again for each in new if (again := each.life.dies + troubles.repair) < end]
    return machines


def _machine(begins: float, end: float, draw: np.random.Generator, troubles: Troubles) -> Machine:
    up, down, delay = (float(np.exp(draw.uniform(*np.log(of)))) for of in ((5, 100), (50, 500), (5, 50)))
    dies = begins + draw.exponential(troubles.death_every)
    life = Life(begins, dies if dies < end else math.inf, bool(draw.random() < 0.5))
    port = Port(up=up, down=max(up, down), delay=delay)
    return Machine(port, float(np.exp(draw.normal(0.0, 0.2))), life, troubles)


class PerByte(float):
    """Seconds per byte, where messages of some sizes stand for larger ones."""

    sizes: ClassVar[dict[int, float]] = {}

    def __mul__(self, nbytes: float) -> float:
        return float(self) * self.sizes.get(int(nbytes), nbytes)

    @classmethod
    def body_for(cls, nbytes: float) -> int:
        """Body of a message that stands for so many bytes: of an odd size, as those of no other message are."""
        known = {stands: wire for wire, stands in cls.sizes.items()}
        wire = known.get(nbytes, SLOT_BYTES + 8001 + 2 * len(known))
        cls.sizes[wire] = nbytes
        return wire - SLOT_BYTES


def bulk_sum(own: Callable[..., Any], nbytes: float, x: Tensor, rank: int, size: int) -> Any:
    """Sum of x, by its own schedule, and as many bytes of each rank as a sum of the real model sends."""
    total = yield from own(x, rank, size)
    if x.numel() >= NUMEL and size > 1:
        sends = nbytes * (x.numel() // NUMEL) * PARAMETERS / 4
        pieces = math.ceil(sends / PIECE_BYTES)
        body = PerByte.body_for(sends / pieces)
        for _ in range(pieces):
            yield Round({(rank + 1) % size: Payload.allocate(body)}, {(rank - 1) % size: body})
        yield from schedules.barrier(rank, size)
    return total


def bulk_rounded(own: Callable[..., Any], x: Tensor, rank: int, size: int, *, bits: int = 8) -> Any:
    """The same of a sum that is rounded, which nothing is here."""
    total = yield from bulk_sum(own, (bits + max(bits, 4)) / 8, x, rank, size)
    return Rounded(total, torch.zeros_like(x))


def bulk_state(packed: Tensor) -> Any:
    """State of a newcomer, as many bytes as the real model's."""
    PerByte.sizes[SLOT_BYTES + STATE_CHUNK] = PARAMETERS * STATE_BYTES / (packed.numel() // STATE_CHUNK)
    return (yield from GIVE(packed))


@contextmanager
def as_large_as_the_real_model() -> Iterator[None]:
    """Messages take as long as those of `PARAMETERS`; who waits looks at the board, and asks who lives, less often."""
    own = schedules.allreduce
    with ExitStack() as patches:
        for where, name, value in (
            (schedules, "allreduce", partial(bulk_sum, own, 8.0)),
            (schedules, "quantised_allreduce", partial(bulk_rounded, own)),
            (transfer, "give", bulk_state),
            (transfer, "CHUNK_BYTES", STATE_CHUNK),
            (membership, "POLL_SECONDS", 10.0),
            (pulse, "ASKS", 1),
        ):
            patches.enter_context(patch.object(where, name, value))
        yield


@dataclass(frozen=True)
class Way:
    """make: optimizer of an inner one. timeout: of the Elastic, which an exchange without rounds must not exceed.

    streams: in four fragments, each of which has a quarter of the block to come.
    """

    make: partial[Any]
    timeout: float = 3600.0
    streams: bool = False

    def optimizer(self, model: nn.Module, inner: torch.optim.Optimizer, every: int, comm: Elastic) -> Any:
        """Optimizer of this way, over blocks of so many steps."""
        streams = {"fragments": 4, "delay": every // 4} if self.streams else {}
        return self.make(inner, model=model, sync_every=every, comm=comm, broadcast=False, **streams)


WAYS = {
    "DiLoCo": Way(partial(DiLoCo)),
    "Streaming DiLoCo": Way(partial(StreamingDiLoCo), streams=True),
    "DiLoCo, majority": Way(partial(DiLoCo, allreduce=partial(PartialAllreduce, quorum="majority")), 120.0),
    "all together": Way(
        partial(StreamingDiLoCo, allreduce=partial(PartialAllreduce, quorum="majority", compress="int2")),
        120.0,
        streams=True,
    ),
}


class DayOver(Exception):  # noqa: N818
    """The day is over."""


@dataclass
class Day:
    """What the machines tell. seconds: usual ones of the steps that are in means; steps: their number."""

    end: float
    steps: int = 0
    seconds: float = 0.0
    joined: int = 0
    late: int = 0
    rounds: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class Cluster:
    """So many machines, for so many hours, by one way."""

    way: Way
    ranks: int
    hours: float

    def row(self, seed: int) -> dict[str, Any]:
        """Goodput and the rest, of one seed."""
        day = Day(3600 * self.hours)
        machines = drawn(self.ranks, day.end, seed, Troubles())
        faults = [fault for place, each in enumerate(machines) for fault in each.faults(place)]
        world = SimulatedWorld(len(machines), _paths([each.port for each in machines]), seed=seed, faults=faults)
        with untold(), as_large_as_the_real_model(), suppress(DayOver):
            world.run(lambda comm: self._live(comm, machines[comm.rank], day, seed))
        return {
            "goodput": day.seconds / (self.ranks * day.end),
            "tokens": day.steps * TOKENS / self.hours / 1e6,
            "rounds": max(day.rounds) * 24 / self.hours,
            "deaths": len(faults),
            "joined": day.joined,
            "late": day.late,
        }

    def _live(self, comm: SimulatedCommunicator, machine: Machine, day: Day, seed: int) -> None:
        """Trains until the machine dies, or the day is over; joins anew where it was left out."""
        seconds = machine.seconds(LOOK, np.random.default_rng((seed, comm.rank)))
        comm.elapse(machine.life.begins)
        while comm.clock() < machine.life.dies:
            try:
                self._train(comm, machine, day, seconds)
            except LeftOutError:
                day.late += comm.clock() < machine.life.dies
        comm.elapse(FOREVER)

    def _train(
        self, comm: SimulatedCommunicator, machine: Machine, day: Day, seconds: Callable[[float], float]
    ) -> None:
        """Trains until the machine is dead."""
        world = Elastic(comm, start_with=self.ranks, at_least=2, timeout=self.way.timeout)
        day.joined += world.newcomer
        model = nn.ParameterDict({str(number): torch.zeros(NUMEL) for number in range(4)})
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = self.way.optimizer(model, inner, EVERY // LOOK, world)
        looks = given = 0
        while comm.clock() < machine.life.dies:
            comm.elapse(seconds(comm.clock()))
            if comm.clock() > day.end:
                raise DayOver
            optimizer.step()
            optimizer.average()
            looks += 1
            if optimizer._driver.block.done == 0 and comm.clock() < min(machine.life.dies, day.end):
                new, given = (looks - given) * LOOK, looks
                day.steps, day.seconds = day.steps + new, day.seconds + new * machine.usual
                day.rounds.append(int(optimizer.stats()["boundaries"]))


def _paths(ports: Sequence[Port]) -> Callable[[int, int], Path]:
    own = paths_of(ports)

    @cache
    def path(source: int, target: int) -> Path:
        found = own(source, target)
        return replace(found, up=PerByte(found.up), down=PerByte(found.down))

    return path


def main(argv: Sequence[str] = ()) -> None:
    """Prints the table."""
    parser = parser_of("wide-area-day", __doc__, full="a day of 256 machines")
    parser.add_argument("--ranks", type=int, help="default 32, with --full 256")
    parser.add_argument("--hours", type=float, help="of the virtual clock; default 4, with --full 24")
    parser.add_argument("--seeds", type=int, help="default 1")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="default all")
    options = asked(parser, argv, ranks=(32, 256), hours=(4.0, 24.0), seeds=(1, 1))
    rows = (_row(way, options) for way in options.ways)
    record(options, rows, labels=("way",), values=("goodput",), against="machines that never wait or die", shown=SHOWN)


def _row(way: str, options: Any) -> dict[str, Any]:
    found = [Cluster(WAYS[way], options.ranks, options.hours).row(seed) for seed in range(options.seeds)]
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {"way": way, **medians, "goodput_samples": [one["goodput"] for one in found]}
