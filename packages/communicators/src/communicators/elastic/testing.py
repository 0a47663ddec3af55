"""Laws of elastic groups, checked by drawn schedules of kills, pauses, joins, leaves, lost links and a lost board.

`check_elastic_laws(seed)` runs one schedule in a simulated world, and prints how to run it again where a law is broken.
What ranks do in it is a `Training`, with laws of its own: by default a `Ledger`, into which they add vectors of
integers, one atomic exchange a step.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from communicators.collectives import allreduce
from communicators.communicator import Communicator
from communicators.elastic.board import PROBE_SECONDS
from communicators.elastic.elastic import Elastic
from communicators.elastic.membership import WINDOW_SECONDS, LeftOutError
from communicators.link import Link
from communicators.simulated.network import BoardLost, Dies, LinkLost
from communicators.simulated.world import SimulatedWorld

STEPS = 8
STEP_SECONDS = 0.02
TIMEOUT = 0.2
LIMIT_SECONDS = 60.0
"""Virtual time by which every schedule is over."""
RESCUE_SECONDS = 4.0
"""Time at which further ranks come, in case that too few are left."""


@dataclass(frozen=True)
class Plan:
    """Schedule of one rank: seconds, or numbers of its own steps."""

    begins: float = 0.0
    dies: float | None = None
    pauses: Mapping[int, float] = field(default_factory=dict)
    leaves: int | None = None


@dataclass(frozen=True)
class Entry:
    """Exchange that a rank has taken: its number, the group of its sum, and the sum."""

    number: int
    generation: int
    members: tuple[str, ...]
    total: tuple[float, ...]


@dataclass
class Life:
    """Story of a rank under one name, written as it happens.

    Attributes:
        notes: What a training writes down for its own laws.
    """

    place: int
    plan: Plan
    at_least: int
    name: str = ""
    entries: list[Entry] = field(default_factory=list)
    groups: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    ledger: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    step: int = 0
    seconds: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    too_few: int = 0
    lagged: bool = False

    def begin_step(self, comm: Communicator, world: Elastic, *, amid: bool = False) -> None:
        """Notes the group, and spends the time of a step, with what the plan has for it. amid: a block of steps."""
        self.name = world.members[world.rank]
        self.groups.append((world.generation, world.members))
        self.too_few += world.size < self.at_least and not amid
        comm.elapse(STEP_SECONDS + self.plan.pauses.get(self.step, 0.0))
        if self.plan.leaves == self.step:
            world.leave()

    def confirmed(self) -> list[Entry]:
        """Entries on which others rely: all but the last one of a rank that did not come to the end."""
        return self.entries if self.end == "done" else self.entries[:-1]


@dataclass(frozen=True)
class Schedule:
    """Everything that happens in one world."""

    seed: int
    at_least: int
    plans: tuple[Plan, ...]
    slowdown: tuple[float, ...]
    jitter: float
    link: Link
    faults: tuple[Any, ...]

    @property
    def disturbances(self) -> int:
        """Number of faults that may each cost a time-out."""
        return len(self.faults) + sum(len(plan.pauses) + (plan.begins > 0) for plan in self.plans) + 2


def draw_schedule(seed: int, size: int | None = None) -> Schedule:
    """Schedule of a seed; its last ranks come late, so that a group that is too small goes on."""
    dice = random.Random(seed)
    size = size or dice.choice([2, 2, 3, 3, 4, 5, 6, 8, 8, 16])
    at_least = dice.choice([1, 1, 2, min(3, size)])
    often = dice.choice([0.1, 0.3, 0.6])
    plans = [_drawn_plan(dice, often, first=place < at_least) for place in range(size)]
    plans += [Plan(begins=RESCUE_SECONDS)] * at_least
    deaths = [_drawn_death(dice, place, plan.dies) for place, plan in enumerate(plans) if plan.dies is not None]
    lost = [BoardLost(dice.uniform(0, 0.4), dice.uniform(0.01, 1.0))] if dice.random() < 0.3 else []
    link = Link(dice.choice([1e-5, 1e-3, 5e-3]), 0.0)
    slowdown = tuple(dice.choice([1.0, 1.0, 1.0, 3.0]) for _ in plans)
    jitter = dice.choice([0.0, 0.0, 1e-3, 0.01])
    dark = [_drawn_dark(dice, size) for _ in range(dice.choice([0, 0, 0, 1, 1, 2]))] if size > 1 else []
    return Schedule(seed, at_least, tuple(plans), slowdown, jitter, link, (*deaths, *lost, *dark))


def _drawn_death(dice: random.Random, place: int, at: float) -> Dies:
    """Death at a time, or with a message: that hits exchanges and commits."""
    return Dies(place, at=at) if dice.random() < 0.4 else Dies(place, message=dice.randrange(60))


def _drawn_dark(dice: random.Random, size: int) -> LinkLost:
    """Loss of the link between two ranks, or of one rank's links to all others and the board."""
    rank, peer = dice.sample(range(size), 2)
    return LinkLost(rank, dice.choice([peer, None]), dice.uniform(0, 0.5), dice.choice([0.05, 0.5, 3.0, 30.0]))


def _drawn_plan(dice: random.Random, often: float, *, first: bool) -> Plan:
    return Plan(
        begins=0.0 if first or dice.random() > often else dice.uniform(0, 0.5),
        dies=dice.uniform(0, 0.6) if dice.random() < often else None,
        pauses={dice.randrange(STEPS): dice.choice([0.1, 1.0, 2.0])} if dice.random() < often / 2 else {},
        leaves=dice.randrange(STEPS) if dice.random() < often / 4 else None,
    )


class Training(ABC):
    """Actions of every rank under a schedule.

    Attributes:
        timeout: The Elastic's, several times the longest exchange without a fault.
    """

    timeout: float = TIMEOUT

    @abstractmethod
    def train(self, comm: Communicator, world: Elastic, life: Life) -> None:
        """Trains to the end, and sets `life.end`: "done", or "left". Each step is begun by `life.begin_step`."""

    @abstractmethod
    def check(self, lives: list[Life]) -> None:
        """Raises AssertionError where a law of its own does not hold."""


def check_elastic_laws(seed: int, size: int | None = None, training: Training | None = None) -> int:
    """Runs the schedule of a seed; AssertionError where a law does not hold. Returns how many generations there were.

    Args:
        seed: Draws everything.
        size: Number of ranks besides those who come last; drawn by default.
        training: What ranks do, default a `Ledger`.
    """
    schedule, training = draw_schedule(seed, size), training or Ledger()
    lives: list[Life] = []
    try:
        _run(schedule, training, lives)
        _check(schedule, training.timeout, lives)
        training.check(lives)
    except BaseException:
        print(f"again: check_elastic_laws({seed}, {size}, {training})\n{schedule}", flush=True)
        raise
    return max((generation for life in lives for generation, _ in life.groups), default=0)


def _run(schedule: Schedule, training: Training, lives: list[Life]) -> None:
    size = len(schedule.plans)
    end = [Dies(place, at=LIMIT_SECONDS) for place in range(size)]
    world = SimulatedWorld(
        size,
        schedule.link,
        seed=schedule.seed,
        slowdown=schedule.slowdown,
        jitter=schedule.jitter,
        faults=[*schedule.faults, *end],
    )
    world.run(lambda comm: _live(comm, schedule, training, lives))


def _live(comm: Communicator, schedule: Schedule, training: Training, lives: list[Life]) -> None:
    """Lives of one rank, which joins anew whenever it was left out."""
    plan, again = schedule.plans[comm.rank], True
    if plan.begins:
        comm.elapse(plan.begins / schedule.slowdown[comm.rank])
    while again:
        life = Life(comm.rank, plan, schedule.at_least)
        lives.append(life)
        world = Elastic(comm, at_least=schedule.at_least, timeout=training.timeout, patience=2 * RESCUE_SECONDS)
        try:
            again = False
            if world.joining or not any(other.end in ("done", "left") for other in lives):
                training.train(comm, world, life)
            else:  # a training of its own, after the others have ended theirs
                life.end = "not let in: the training was over"
                world.close()
        except LeftOutError as error:
            life.end, life.lagged = f"left out: {error}", any(2 * s >= training.timeout for s in plan.pauses.values())
            plan, again = Plan(), True  # nothing further happens to it
        except TimeoutError as error:
            life.end, again = f"not let in: {error}", False
        except Exception as error:
            life.end, again = f"failed: {type(error).__name__}: {error}", False


def vector(name: str, step: int) -> Tensor:
    """Summand of a rank at a step, of integers whose sums are exact."""
    return torch.tensor([random.Random(f"{name} {step} {i}").randrange(1 << 30) for i in range(5)], dtype=torch.float64)


def _check(schedule: Schedule, timeout: float, lives: list[Life]) -> None:
    dead = {fault.rank for fault in schedule.faults if isinstance(fault, Dies)}
    dark = [fault for fault in schedule.faults if isinstance(fault, LinkLost)]
    cut = {place for fault in dark for place in (fault.rank, fault.peer)}
    outages = sum(fault.seconds for fault in schedule.faults if isinstance(fault, BoardLost))
    for life in lives:
        assert life.end or life.place in dead, f"hang: rank {life.place} is not over after {LIMIT_SECONDS} s: {life}"
        gave_up = cut and "could not join" in life.end  # whose generations a lost link kept from coming together
        assert gave_up or not life.end.startswith("failed"), f"error: rank {life.place} {life.end}"
        assert not life.too_few, (
            f"at_least={schedule.at_least}: rank {life.place} began {life.too_few} steps with fewer"
        )
        if life.end.startswith("left out"):
            assert life.name in life.end, f"left out: {life.name} is not told by name: {life.end}"
            assert life.lagged or outages or life.place in cut, (
                f"patience: rank {life.place} was left out though it was not late"
            )
        slowest = max(life.seconds, default=0.0)
        pauses = sum(seconds * 3 for plan in schedule.plans for seconds in plan.pauses.values())
        alone = sum(fault.seconds for fault in dark if fault.peer is None and fault.rank == life.place)
        probes = 2 * PROBE_SECONDS if dark else 0.0  # a rank may die while others wait whom it reaches
        bound = schedule.disturbances * (timeout + WINDOW_SECONDS) + min(pauses, 1.0) + outages + alone + probes
        assert slowest <= bound, f"waiting: rank {life.place} was {slowest:g} s in a step, at most {bound:g}"
    _check_groups(lives)
    over = any(life.end == "done" for life in lives)
    assert over or all("not let in" in life.end or life.end == "left" or not life.end for life in lives[-1:]), "nobody"


def _check_groups(lives: list[Life]) -> None:
    """One list of members a generation, and no exchange of an older one after one of a newer."""
    groups: dict[int, tuple[str, ...]] = {}
    for generation, members in (group for life in lives for group in life.groups):
        known = groups.setdefault(generation, members)
        assert known == members, f"split: generation {generation} is {known} and {members}"
    order = sorted({(entry.number, entry.generation) for life in lives for entry in life.confirmed()})
    generations = [generation for _, generation in order]
    assert generations == sorted(generations), f"split: a generation went on beside a newer one: {order}"


class Ledger(Training):
    """Adds all ranks' vectors into a ledger, in two exchanges of one atomic whole a step."""

    def __repr__(self) -> str:
        return "Ledger()"

    def train(self, comm: Communicator, world: Elastic, life: Life) -> None:
        if world.joining and (state := world.take()):
            life.step = state["step"]
            life.ledger.copy_(state["ledger"])
        while life.step < STEPS:
            life.begin_step(comm, world)
            _step(world, life)
            if life.step < STEPS:
                world.boundary(lambda: {"step": life.step, "ledger": life.ledger.clone()})
                if world.leaving:
                    life.end = "left"
                    return
        life.end = "done"
        world.close()

    def check(self, lives: list[Life]) -> None:
        totals = _check_totals(lives)
        for life in lives:
            if life.end == "done":
                expected = sum((totals[number] for number in range(1, STEPS + 1)), torch.zeros(5, dtype=torch.float64))
                assert torch.equal(life.ledger, expected), f"agreement: {life} has another ledger than {expected}"


def _step(world: Elastic, life: Life) -> None:
    before, began = life.ledger.clone(), world.clock()

    def exchange() -> tuple[int, tuple[str, ...], Tensor]:
        own = vector(world.members[world.rank], life.step)
        life.ledger[:3] += (first := allreduce(own[:3], world))
        life.ledger[3:] += (second := allreduce(own[3:], world))
        return world.generation, world.members, torch.cat([first, second])

    generation, members, total = world.atomic(exchange, lambda: life.ledger.copy_(before))
    life.step += 1
    life.entries.append(Entry(life.step, generation, members, tuple(total.tolist())))
    life.seconds.append(world.clock() - began)


def _check_totals(lives: list[Life]) -> dict[int, Tensor]:
    """Every exchange was taken alike by all who go on, and is the sum over the ranks of its group."""
    taken: dict[int, Entry] = {}
    last = {entry.number: entry for life in lives for entry in life.entries}  # given to a newcomer before a death
    for life in lives:
        for entry in life.confirmed():
            first = taken.setdefault(entry.number, entry)
            assert (entry.members, entry.total) == (first.members, first.total), f"atomicity: {entry} and {first}"
    totals = {}
    for number, entry in (last | taken).items():
        totals[number] = sum((vector(name, number - 1) for name in entry.members), torch.zeros(5, dtype=torch.float64))
        assert tuple(totals[number].tolist()) == entry.total, f"sum: {entry} is not the sum over its members"
    return totals
