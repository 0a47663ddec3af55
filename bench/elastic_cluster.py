"""A cluster with `Elastic` itself: `DiLoCo` on simulated ranks that hang, are slow for a while, die and come back.

Real are membership, exchanges, commits, time-outs, joining and the state of newcomers, by messages in virtual time;
each rank draws its own seconds. Not real: the model has two parameters, LOOK steps pass as one, except where a death
would be noticed in between, a mean takes `Costs.round` besides its messages, and who waits looks at the board every
second, not up to 200 times. Half of the deaths close their connections, which the others see at their next step; the
other half are dark, and only the time-out of the next exchange finds them. Who was repaired, or was left out because it
was late, joins anew.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
from communicators import Dies, Elastic, LeftOutError, SimulatedWorld
from communicators.elastic import membership
from communicators.simulated.world import SimulatedCommunicator
from local_sgd import DiLoCo
from torch import nn

from bench.troubles import Costs, Troubles, slow_ones, step_seconds, untold

LOOK = 50
"""Steps that pass as one."""


@dataclass(frozen=True)
class Life:
    """A rank from its beginning to its death, in virtual seconds. dark: nobody is told of the death."""

    begins: float
    dies: float
    dark: bool


@dataclass
class Day:
    """What the ranks of one world tell the benchmark, and what that tells them.

    end: seconds after which the next mean is the last. given: steps that were in means. ranks: in each mean, by its
    number; ends: when it was there. saves: means after which all write a checkpoint. deaths, joined, late: ranks that
    died, that joined, and that were left out alive.
    """

    end: float
    given: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    ends: dict[int, float] = field(default_factory=dict)
    saves: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    deaths: int = 0
    joined: int = 0
    late: int = 0

    def mean(self, number: int, steps: int, now: float, seldom: float) -> None:
        """Notes that a rank has this mean, of so many steps of its own. seldom: seconds between checkpoints."""
        self.given += steps
        self.ranks[number] += 1
        if number not in self.ends:
            self.ends[number] = now
            if now - max(self.saves.values()) > seldom:
                self.saves[number] = now


@dataclass
class ElasticCluster:
    """A run of so many ranks. every: steps between two exchanges. timeout: of the Elastic, in seconds."""

    size: int
    every: int = 500
    timeout: float = 60.0
    troubles: Troubles = field(default_factory=Troubles)
    costs: Costs = field(default_factory=Costs)

    @property
    def how(self) -> str:
        """Name of the row."""
        return f"Elastic, DiLoCo of {self.every}"

    def shares(self, hours: float, seed: int) -> tuple[float, float]:
        """(steps that were in means, of those of ranks that never wait, are late or die; ranks in a mean)."""
        day = self.day(hours, seed)
        share = day.given * self.troubles.step / (self.size * max(day.ends.values()))
        return share, day.ranks.total() / (self.size * len(day.ranks))

    def day(self, hours: float, seed: int) -> Day:
        """What happens until the first mean after so many hours."""
        day = Day(3600 * hours)
        lives = self._lives(day.end, seed)
        day.deaths = sum(life.dies < day.end for life in lives)
        faults = [
            Dies(place, at=life.dies) for place, life in enumerate(lives) if life.dies < day.end and not life.dark
        ]
        told = sorted(lives[fault.rank].dies for fault in faults)
        world = SimulatedWorld(len(lives), seed=seed, faults=faults)
        with untold(), patch.object(membership, "POLL_SECONDS", 1.0):
            world.run(lambda comm: self._live(comm, lives[comm.rank], day, told, seed))
        return day

    def _lives(self, end: float, seed: int) -> list[Life]:
        """Those of the first ranks, and of all that come in the place of one that died."""
        draw, lives, begins = np.random.default_rng(seed), list[Life](), [0.0] * self.size
        while begins:
            lives += (new := [self._life(begin, draw) for begin in begins])
            begins = [again for life in new if (again := life.dies + self.troubles.repair) < end]
        return lives

    def _life(self, begins: float, draw: np.random.Generator) -> Life:
        return Life(begins, begins + draw.exponential(self.troubles.death_every), bool(draw.random() < 0.5))

    def _computes(
        self, comm: SimulatedCommunicator, life: Life, told: list[float], seed: int
    ) -> Callable[[Elastic, int], bool]:
        """What lets a rank compute some steps, and returns whether it still lives. told: deaths that it notices."""
        draw = np.random.default_rng((seed, comm.rank))
        slow = slow_ones(self.troubles, 1, draw)

        def compute(world: Elastic, steps: int) -> bool:
            seconds = step_seconds(self.troubles, slow(comm.clock()).repeat(steps), draw)
            ends = comm.clock() + seconds.cumsum()
            if life.dark and ends[-1] > life.dies:
                return False
            for death in told:
                if comm.clock() < death < ends[-1]:
                    comm.elapse(float(came := ends[ends > death][0]) - comm.clock())
                    world.catch_up()  # as every step does
                    ends += comm.clock() - came
            comm.elapse(max(0.0, float(ends[-1]) - comm.clock()))
            return True

        return compute

    def _live(self, comm: SimulatedCommunicator, life: Life, day: Day, told: list[float], seed: int) -> None:
        """Trains to the end, and joins anew where it was left out."""
        compute = self._computes(comm, life, told, seed)
        comm.elapse(life.begins)
        while comm.clock() < day.end:
            try:
                self._train(comm, day, compute)
                comm.elapse(day.end)  # the dead say nothing until all is over
            except LeftOutError:
                day.late += 1
            except TimeoutError:  # nobody trains any more
                return

    def _train(self, comm: SimulatedCommunicator, day: Day, compute: Callable[[Elastic, int], bool]) -> None:
        """Trains until the rank dies, or all is over."""
        blocks = [1, *[LOOK] * (self.every // LOOK - 1), LOOK - 1]  # with the second step newcomers get their state
        patience = 3 * self.every * self.troubles.step
        world = Elastic(comm, start_with=self.size, at_least=2, timeout=self.timeout, patience=patience)
        joins = world.joining  # waits for the others
        day.joined += joins
        model = nn.Linear(1, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = DiLoCo(inner, model=model, sync_every=len(blocks), comm=world)
        over = False
        while not over:
            for place, steps in enumerate(blocks, 1):
                if not compute(world, steps):
                    return
                optimizer.step()
                comm.elapse(self.costs.round * (place == len(blocks)))
                optimizer.average()
            number = int(optimizer.stats()["boundaries"])
            day.mean(number, self.every, comm.clock(), self.costs.seldom)
            comm.elapse(self.costs.checkpoint * (number in day.saves))
            over = day.ends[number] > day.end
