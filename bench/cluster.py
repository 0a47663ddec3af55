"""The share of its ideal throughput that a cluster keeps, where ranks hang, are slow for a while, and die.

    python -m bench cluster [--ranks P] [--hours H] [--seeds N] [--elastic-hours H] [--elastic-seeds N] [--full]
        [--output DIR]

By a virtual clock, seconds that are drawn, and the rules of partial rounds alone: 256 ranks, steps of
5 s, of which 2 % take longer by 2.5 s in the mean; a rank is slow for an hour every 100 hours, and dies every 1,000
hours, so that one of all dies every 4. share: gradients that were kept, against ranks that never wait, are late or die:
median and extremes of the seeds. contributors: of a round, of all ranks. After a death the ways with "restarts" begin
again at the last checkpoint; those with "shrink" go on with who is left, and write a checkpoint every hour only. grace:
as long as a round's collective takes. Nothing of this tells how well is learnt: see `bench eager`.

What is modelled, round by round: when each rank arrives, who coordinates, when the quorum is there, how long grace
lasts, who must be waited for, what late ranks contribute (`partial_collectives.protocol.rules`); ranks that hang, are
slow for a while, die and come back. What is not: messages (a round's collective takes `Costs.round`), learning.

The last row is no model of a way, but `DiLoCo` over an `Elastic` as it is, on simulated ranks that exchange messages,
with the same troubles and costs; it exchanges every 500 steps, and checkpoints as "shrink" do: see
`bench.elastic_cluster`. An hour of 256 ranks takes about 15 s, so that it has hours and seeds of its own: 3 hours by
default, and with --full a day by three seeds.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any

import numpy as np
from partial_collectives.protocol.rules import Rules

from bench.elastic_cluster import ElasticCluster
from bench.record import asked, parser_of, record
from bench.troubles import Costs, Flags, Times, Troubles, steps_of


class Ranks:
    """When each of them arrives next, and what it holds. draw: the seconds of the next step of some ranks.

    given: gradients that were in rounds, of all.
    """

    def __init__(self, size: int, draw: Callable[[Flags], Times]) -> None:
        self.draw, all_ = draw, np.ones(size, dtype=np.bool_)
        self.arrives, self.following = draw(all_), draw(all_)  # with the step under way; seconds of the one after it
        self.holds = np.zeros(size, dtype=np.int64)  # gradients that are in no round yet
        self.waits, self.behind, self.alive = (np.full(size, value) for value in (False, False, True))
        self.missed = np.zeros(size, dtype=np.int64)
        self.given = 0

    def computed_until(self, now: float) -> None:
        """All gradients that were given by now. Who has rounds to apply goes on at once, the others wait."""
        for _ in range(2):
            came = self.alive & ~self.waits & (self.arrives <= now)
            self.holds[came] += 1
            goes_on = came & self.behind
            self.arrives[goes_on] += self.following[goes_on]
            self.following[goes_on] = self.draw(goes_on)
            self.behind[goes_on] = False
            self.waits |= came & ~goes_on

    def arrivals(self) -> Times:
        """When each will wait for a round; infinite for those that are dead."""
        when = np.where(self.behind, self.arrives + self.following, self.arrives)
        return np.where(self.alive, np.where(self.waits, 0.0, when), np.inf)

    def round_is_over(self, now: float) -> None:
        """Who waited goes on; the others find it when they come."""
        goes_on = self.waits.copy()
        self.arrives[goes_on] = now + self.following[goes_on]
        self.following[goes_on] = self.draw(goes_on)
        self.waits[:] = False
        self.behind = self.alive & ~goes_on

    def anew(self, who: Flags, now: float) -> None:
        """They begin a step, and hold nothing."""
        self.arrives[who], self.following[who] = now + self.draw(who), self.draw(who)
        self.holds[who], self.missed[who] = 0, 0
        self.waits[who], self.behind[who], self.alive[who] = False, False, True


def told_to_begin(ranks: Ranks, rules: Rules, number: int, now: float, grace: float) -> float:
    """When a round's quorum is there, and grace over; the last round has ended now. grace: seconds."""
    arrivals, living = ranks.arrivals(), np.flatnonzero(ranks.alive)
    if rules.quorum == "majority":
        there = float(arrivals[rules.drawn(number, living.tolist())])
    else:
        needed = 1 if rules.quorum == "solo" else min(int(rules.quorum), len(living))
        there = float(np.sort(arrivals[living])[needed - 1])
    if grace:
        there = min(max(there, now) + grace, float(arrivals[living].max()))
    return max(now, there)


def one_round(
    ranks: Ranks, rules: Rules, number: int, now: float, *, grace: float, seconds: float
) -> tuple[float, Flags]:
    """(when it is over, who contributed). seconds: of its collective.

    Ranks enter with what they hold when they are told; one that has missed too many rounds, with its next gradient.
    """
    told = told_to_begin(ranks, rules, number, now, grace)
    ranks.computed_until(told)
    waited_for = ranks.alive & (ranks.missed >= rules.max_staleness) & (ranks.holds == 0)
    contributes = ranks.alive & (ranks.holds > 0) | waited_for
    end = max(told, float(ranks.arrives[waited_for].max(initial=0.0))) + seconds
    ranks.given += int(ranks.holds[contributes].sum() + waited_for.sum())
    ranks.holds[:] = 0
    ranks.computed_until(end)
    ranks.holds[waited_for] -= 1
    ranks.round_is_over(end)
    ranks.missed = np.where(contributes, 0, ranks.missed + 1)
    return end, contributes


@dataclass
class Cluster:
    """A run of so many ranks. shrinks: after a death the others go on, and who was repaired comes back; else all
    restart from the last checkpoint, with a spare. grace: seconds."""

    size: int
    rules: Rules
    grace: float = 0.0
    shrinks: bool = False
    troubles: Troubles = field(default_factory=Troubles)
    costs: Costs = field(default_factory=Costs)

    def shares(self, hours: float, seed: int) -> tuple[float, float]:
        """(gradients that were kept, of those of ranks that never wait, are late or die; contributors of a round)."""
        draw, end = np.random.default_rng(seed), 3600 * hours
        now = saved_at = 0.0
        kept = number = 0
        ranks = Ranks(self.size, steps_of(self.troubles, self.size, draw, lambda: now))
        dies = draw.exponential(self.troubles.death_every, self.size)
        returns = np.full(self.size, np.inf)
        often = self.costs.interval(self.troubles.death_every / self.size)
        interval, contributors = self.costs.seldom if self.shrinks else often, 0.0
        while now < end:
            now, brought = one_round(ranks, self.rules, number, now, grace=self.grace, seconds=self.costs.round)
            contributors += brought.sum() / self.size
            number += 1
            dead = ranks.alive & (dies <= now)
            if dead.any() and not self.shrinks:
                ranks.given, now = kept, now + self.costs.notice + self.costs.restart
                dies[dead] = now + draw.exponential(self.troubles.death_every, int(dead.sum()))
                ranks.anew(np.ones(self.size, dtype=np.bool_), now)
                saved_at = now
            elif dead.any():
                ranks.alive &= ~dead
                returns[dead], now = dies[dead] + self.troubles.repair, now + self.costs.notice
            back = returns <= now
            if back.any():
                ranks.anew(back, now)
                dies[back], returns[back] = now + draw.exponential(self.troubles.death_every, int(back.sum())), np.inf
            if now - saved_at > interval:
                now += self.costs.checkpoint
                kept, saved_at = ranks.given, now
        return ranks.given * self.troubles.step / (self.size * now), contributors / number


SHOWN = ("how", "share", "least", "most", "contributors", "hours")
AGAINST = "ranks that never wait, are late or die"


def main(argv: Sequence[str] = ()) -> None:
    """Prints the table."""
    parser = parser_of("cluster", __doc__, full="ten times as many hours; a day by Elastic itself")
    parser.add_argument("--ranks", type=int, default=256, help="default 256")
    parser.add_argument("--hours", type=float, help="of the virtual clock; default 24, with --full 240")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--elastic-hours", type=float, help="of the last row; default 3, with --full 24; 0: without it")
    parser.add_argument("--elastic-seeds", type=int, help="of the last row; default 1, with --full 3")
    options = asked(parser, argv, hours=(24.0, 240.0), elastic_hours=(3.0, 24.0), elastic_seeds=(1, 3))
    runs: list[tuple[str, Cluster | ElasticCluster, float, int]]
    runs = [(how, cluster, options.hours, options.seeds) for how, cluster in ways(options.ranks).items()]
    if options.elastic_hours:
        elastic = ElasticCluster(options.ranks)
        runs.append((elastic.how, elastic, options.elastic_hours, options.elastic_seeds))
    record(
        options, starmap(_row, runs), labels=("how",), values=("share", "contributors"), against=AGAINST, shown=SHOWN
    )


def _row(how: str, cluster: Cluster | ElasticCluster, hours: float, seeds: int) -> dict[str, Any]:
    shares, brought = zip(*(cluster.shares(hours, seed) for seed in range(seeds)), strict=True)
    spread = {"share": statistics.median(shares), "least": min(shares), "most": max(shares)}
    return {"how": how, "hours": hours, **spread, "share_samples": shares, "contributors": statistics.median(brought)}


def ways(ranks: int) -> dict[str, Cluster]:
    """By name."""
    synchronous = Cluster(ranks, Rules(quorum=ranks, max_staleness=0))
    majority = replace(synchronous, rules=Rules())
    return {
        "synchronous, restarts": synchronous,
        "majority, restarts": majority,
        "majority, grace, restarts": replace(majority, grace=synchronous.costs.round),
        "majority, shrink": replace(majority, shrinks=True),
        "majority, grace, shrink": replace(majority, grace=synchronous.costs.round, shrinks=True),
    }
