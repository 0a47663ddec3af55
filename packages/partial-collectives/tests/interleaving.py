"""Plays the protocol on all ranks at once, every event in an order that is drawn, and checks what must always hold.

    python packages/partial-collectives/tests/interleaving.py '{"size": 3, ...}'

plays one case again, as a failure prints it. No world is needed: a round's collective is a wait for all members to have
joined, after which each hears of it in its own time, or of a death before. So is a recovery.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

from partial_collectives.protocol.events import Action, Grace, Header, Join, Kind, LeftOut, Recover, Signal, Stage
from partial_collectives.protocol.machine import Machine
from partial_collectives.protocol.rules import Quorum, Rules

LONGEST = 100_000
"""Events of one case; more mean that it never ends."""


@dataclass(frozen=True)
class Case:
    """One order of events of all that are possible.

    Attributes:
        steps: Gradients that each rank gives between the meetings of all ranks (`synchronize`), one list per rank of
            equal length.
        choices: Which of the events that are possible comes next, each taken modulo their number; after the last one it
            goes on as drawn from the seed.
        deaths: Ranks that may die, at any time.
        rejoin: At every meeting of all that live those that have died come back, from the state of the lowest one.
        fragments: How many take turns. Of several, every rank gives one more gradient to each before it meets or ends.
    """

    size: int
    quorum: Quorum
    max_staleness: int
    grace: bool
    seed: int
    steps: tuple[tuple[int, ...], ...]
    choices: tuple[int, ...] = ()
    deaths: tuple[int, ...] = ()
    rejoin: bool = False
    fragments: int = 1

    @property
    def line(self) -> str:
        """What plays it again."""
        return f"python packages/partial-collectives/tests/interleaving.py '{json.dumps(asdict(self))}'"


class BrokenRuleError(AssertionError):
    """A rule of the protocol did not hold; the message ends with the line that plays the case again."""


@dataclass(frozen=True)
class Applied:
    """A round as one rank got it: its number, its gradients (rank, step), who brought some and who was fresh."""

    round: int
    gradients: tuple[tuple[int, int], ...]
    contributors: tuple[int, ...]
    fresh: tuple[int, ...]
    coordinator: int


@dataclass(frozen=True)
class Entered:
    """What a rank brought to a round's collective, and whom it takes for its coordinator."""

    header: Header
    gradients: tuple[tuple[int, int], ...]
    coordinator: int


Ended: TypeAlias = tuple[list[Header], Applied]
"""What a round's collective gives to each of its ranks."""
Attempt: TypeAlias = tuple[int, frozenset[int]]
"""A round and its members: after a death it is tried again among fewer."""


class Rank:
    """A rank's program, engine and machine. ahead: steps still to make before each meeting, then to the end."""

    def __init__(self, machine: Machine, ahead: Sequence[int]) -> None:
        self.machine = machine
        self.ahead = list(ahead)
        self.given = 0
        self.acc: dict[int, list[tuple[int, int]]] = {}  # by fragment
        self.results: list[Applied] = []  # to be applied
        self.applied: list[Applied] = []
        self.ended: list[Ended] = []
        self.doing = "computes"  # computes | waits | meets | met | ends
        self.alive = True
        self.entered: Attempt | None = None
        self.brought: tuple[tuple[int, int], ...] = ()
        self.recovers: frozenset[int] | None = None
        self.grace: int | None = None

    @property
    def done(self) -> bool:
        """Nothing is left to do for it."""
        return self.doing == "ends" and self.machine.over and self.recovers is None

    def give(self, fragment: int) -> None:
        """A gradient."""
        self.acc.setdefault(fragment, []).append((self.machine.rank, self.given))
        self.given += 1

    def apply(self) -> None:
        """What it has got."""
        self.applied += self.results
        self.results = []


class Play:
    """All ranks of a case, the signals under way, and the round."""

    def __init__(self, case: Case, machine: type[Machine] = Machine) -> None:
        self.case, self._kind = case, machine
        self._rules = Rules(case.quorum, case.max_staleness, case.grace, case.seed, case.fragments)
        self.ranks = [Rank(machine(rank, case.size, self._rules), case.steps[rank]) for rank in range(case.size)]
        self.signals: Counter[tuple[int, int, Kind, int]] = Counter()  # source, target, kind, round
        self.tried: dict[Attempt, dict[int, Entered]] = {}
        self.recovering: dict[frozenset[int], dict[int, Ended | None]] = {}  # what each rank has ended last
        self.at_rest: set[tuple[int, int]] = (
            set()
        )  # rounds, and ranks that entered them without more steps, or are gone
        self.hold_another: set[tuple[int, int]] = set()  # and those that have something for a later one
        self.begun_anew: set[int] = set()  # rounds at which ranks went on without another one
        self.to_die = list(case.deaths)
        self.events = 0
        self._draw = random.Random(case.seed)

    @property
    def living(self) -> dict[int, Rank]:
        """By number."""
        return {number: rank for number, rank in enumerate(self.ranks) if rank.alive}

    @property
    def rounds(self) -> list[Ended]:
        """What all that live have got, in order."""
        return max((rank.ended for rank in self.living.values()), key=len, default=[])

    def run(self) -> Play:
        """Plays it to its end; raises BrokenRuleError."""
        while not all(rank.done for rank in self.living.values()):
            possible = self._possible()
            self._demand(bool(possible), "nothing can happen any more, and ranks wait: a hang")
            self._demand(self.events < LONGEST, "it never ends")
            possible[self._choice() % len(possible)]()
            self.events += 1
        self._check_end()
        return self

    def _choice(self) -> int:
        choices = self.case.choices
        if self.events < len(choices):
            return choices[self.events]
        return self._draw.randrange(1 << 16)

    def _possible(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        for number, rank in self.living.items():
            events += self._possible_on(number, rank)
        for signal in self.signals:
            events.append(partial(self._deliver, signal, again=False))
        if self.signals:
            events.append(partial(self._deliver, next(iter(self.signals)), again=True))
        if all(rank.doing == "met" and rank.recovers is None for rank in self.living.values()):
            events.append(self._rejoin)
        return events

    def _possible_on(self, number: int, rank: Rank) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        if rank.doing == "computes":
            events.append(partial(self._step, number))
        if rank.grace is not None:
            events.append(partial(self._grace_over, number))
        if rank.entered is not None and len(self.tried[rank.entered]) == len(rank.entered[1]):
            events.append(partial(self._complete, number))
        if rank.recovers is not None and len(self.recovering[rank.recovers]) == len(rank.recovers):
            events.append(partial(self._recovered, number))
        if number in self.to_die:
            events.append(partial(self._die, number))
        for other in rank.machine.members - set(self.living):
            if number == min(self.living) or (number + other) % 2:  # the rest hears of it by signals only
                events.append(partial(self._notice, number, other))
        return events

    def _step(self, number: int) -> None:
        """The program of a rank goes on from where it is: a gradient, a meeting or the end."""
        rank = self.ranks[number]
        if rank.ahead[0] == 0:
            rank.ahead.pop(0)
            rank.apply()
            fragments = range(self.case.fragments if self.case.fragments > 1 else 0)
            for fragment in fragments:
                rank.give(fragment)
            rank.doing = "meets" if rank.ahead else "ends"
            self._do(number, rank.machine.rested(Stage.PAUSED if rank.ahead else Stage.FINISHED, fragments))
            return
        rank.ahead[0] -= 1
        for fragment in rank.machine.next_fragments():
            rank.give(fragment)
        behind = bool(rank.results)
        rank.doing = "computes" if behind else "waits"
        rank.apply()
        self._do(number, rank.machine.deposited(behind=behind))

    def _complete(self, number: int) -> None:
        rank = self.ranks[number]
        assert rank.entered is not None
        ended = self._ended(rank.entered)
        rank.entered, rank.brought = None, ()
        self._get(number, ended, lambda: rank.machine.completed(ended[0]))

    def _get(self, number: int, ended: Ended, tell: Callable[[], list[Action]]) -> None:
        """A rank gets a round."""
        rank = self.ranks[number]
        rank.ended.append(ended)
        if ended[1].contributors:
            rank.results.append(ended[1])
        meetings = rank.machine.meetings
        actions = tell()
        if rank.doing == "waits" and rank.results:
            rank.doing = "computes"
        if rank.doing in ("meets", "ends"):  # results are applied as they come
            rank.apply()
        if rank.doing == "meets" and rank.machine.meetings > meetings:
            rank.doing = "met" if self.case.rejoin else "computes"
        self._do(number, actions)

    def _die(self, number: int) -> None:
        """Of what it has sent, some comes."""
        self.to_die.remove(number)
        self.ranks[number].alive = False
        for signal in [one for one in self.signals if number in one[:2]]:
            if signal[1] == number or self._draw.random() < 0.5:
                del self.signals[signal]

    def _notice(self, number: int, other: int) -> None:
        self._do(number, self.ranks[number].machine.gone(other))

    def _recover(self, number: int, members: frozenset[int]) -> None:
        rank = self.ranks[number]
        rank.entered, rank.recovers, rank.grace = None, members, None
        self._demand(number in members and members <= rank.machine.members, f"rank {number} recovers without itself")
        self.recovering.setdefault(members, {})[number] = rank.ended[-1] if rank.ended else None

    def _recovered(self, number: int) -> None:
        rank = self.ranks[number]
        members, rank.recovers = rank.recovers, None
        assert members is not None
        last = max((one for one in self.recovering[members].values() if one), key=_round_of, default=None)
        ahead = 0 if last is None else last[1].round + 1 - len(rank.ended)
        self._demand(ahead in (0, 1), f"rank {number} is {ahead} rounds behind")
        self.begun_anew.add(len(rank.ended) + ahead)
        brought, rank.brought = rank.brought, ()
        if ahead and last is not None:
            ended = last
            self._get(number, ended, lambda: rank.machine.recovered(ended[0]))
        else:
            fragment = len(rank.ended) % self.case.fragments
            rank.acc[fragment] = [*brought, *rank.acc.get(fragment, [])]
            self._do(number, rank.machine.recovered(None))

    def _rejoin(self) -> None:
        """Another group of all ranks.

        Those that have died go on from a peer's state, with what is ahead of them.
        """
        states = {number: rank.machine.state() for number, rank in self.living.items()}
        donor = self.ranks[min(states)]
        self._demand(len({len(self.ranks[number].ended) for number in states}) == 1, "a meeting at different rounds")
        self.signals.clear()
        self.tried.clear()
        self.recovering.clear()
        for number, rank in enumerate(self.ranks):
            rank.machine = self._kind(number, self.case.size, self._rules)
            rank.machine.restore(states.get(number, states[min(states)]))
            rank.doing, rank.grace, rank.entered, rank.recovers = "computes", None, None, None
            if not rank.alive:
                rank.alive, rank.acc, rank.results = True, {}, []
                rank.applied, rank.ended = list(donor.applied), list(donor.ended)
                rank.ahead = rank.ahead[-len(donor.ahead) :]

    def _grace_over(self, number: int) -> None:
        rank = self.ranks[number]
        round_, rank.grace = rank.grace, None
        assert round_ is not None
        self._do(number, rank.machine.grace_over(round_))

    def _deliver(self, signal: tuple[int, int, Kind, int], *, again: bool) -> None:
        source, target, kind, round_ = signal
        if again:
            self.events += 1  # so that it is not repeated for ever
        else:
            self.signals[signal] -= 1
            if not self.signals[signal]:
                del self.signals[signal]
        self._do(target, self.ranks[target].machine.heard(source, kind, round_))

    def _do(self, number: int, actions: Sequence[Action]) -> None:
        rank = self.ranks[number]
        for action in actions:
            if isinstance(action, Signal):
                if self.ranks[action.peer].alive:
                    self.signals[number, action.peer, action.kind, action.round] += 1
            elif isinstance(action, Grace):
                rank.grace = action.round
            elif isinstance(action, Recover):
                self._recover(number, action.members)
            elif isinstance(action, LeftOut):
                self._demand(False, f"rank {number} lives, and is left out")
            else:
                self._enter(number, action)

    def _enter(self, number: int, join: Join) -> None:
        rank = self.ranks[number]
        self._demand(rank.entered is None, f"rank {number} enters round {join.round} before the last is over")
        self._demand(rank.recovers is None, f"rank {number} enters round {join.round} while it recovers")
        self._demand(join.round == len(rank.ended), f"rank {number} enters round {join.round} out of turn")
        brings = rank.acc.pop(join.round % self.case.fragments, [])
        self._demand(join.contributes == bool(brings), f"rank {number} says the wrong thing of what it brings")
        stage = {"meets": Stage.PAUSED, "met": Stage.PAUSED, "ends": Stage.FINISHED}.get(rank.doing, Stage.RUNNING)
        if stage is not Stage.RUNNING:
            self.at_rest.add((join.round, number))
        if any(rank.acc.values()):
            stage = Stage.RUNNING
            self.hold_another.add((join.round, number))
        self._demand(join.stage is stage, f"rank {number} is {stage.name}, but says {join.stage.name}")
        header = Header(join.stage, join.contributes, join.fresh)
        rank.entered, rank.brought = (join.round, rank.machine.members), tuple(brings)
        entered = Entered(header, rank.brought, rank.machine.coordinator)
        self.tried.setdefault(rank.entered, {})[number] = entered

    def _ended(self, attempt: Attempt) -> Ended:
        entered = self.tried[attempt]
        gone = Header(Stage.GONE)
        headers = [entered[r].header if r in entered else gone for r in range(self.case.size)]
        self.at_rest |= {(attempt[0], r) for r, header in enumerate(headers) if header.stage is Stage.GONE}
        drawn = {one.coordinator for one in entered.values()}
        self._demand(len(drawn) == 1, f"ranks draw different coordinators: {drawn}")
        gradients = tuple(gradient for r in sorted(entered) for gradient in entered[r].gradients)
        bring = tuple(r for r, header in enumerate(headers) if header.contributes)
        fresh = tuple(r for r, header in enumerate(headers) if header.fresh)
        return headers, Applied(attempt[0], gradients, bring, fresh, drawn.pop())

    def _check_round(self, headers: Sequence[Header], result: Applied) -> None:
        """Its quorum was there, some with something for a later round; where somebody died it may have begun before."""
        case = self.case
        rested = {r for r in range(case.size) if (result.round, r) in self.at_rest | self.hold_another}
        here = set(result.fresh) | rested
        if result.round in self.begun_anew:
            return
        if case.quorum == "majority":
            self._demand(result.coordinator in here, f"round {result.round} began without rank {result.coordinator}")
        else:
            needed = min(1 if case.quorum == "solo" else int(case.quorum), case.size)
            self._demand(len(here) >= needed, f"round {result.round} began with {len(here)} of {needed}")

    def _check_staleness(self, rounds: Sequence[Ended]) -> None:
        """Nobody has stayed away too long."""
        away = [0] * self.case.size
        for headers, result in rounds:
            for r, header in enumerate(headers):
                excused = (result.round, r) in self.at_rest | self.hold_another
                away[r] = 0 if header.contributes or excused else away[r] + 1
                self._demand(away[r] <= self.case.max_staleness, f"rank {r} missed {away[r]} rounds in a row")

    def _check_end(self) -> None:
        rounds, living = self.rounds, self.living
        for headers, result in rounds:
            self._check_round(headers, result)
        self._check_staleness(rounds)
        applied = Counter(gradient for _, result in rounds for gradient in result.gradients)
        given = Counter((r, step) for r, rank in enumerate(self.ranks) for step in range(rank.given))
        certain = Counter(one for one in given if one[0] in living and one[0] not in self.case.deaths)
        if living:
            self._demand(not any(any(rank.acc.values()) for rank in living.values()), "gradients are left behind")
            self._demand(certain <= applied <= given, f"lost or doubled: {certain - applied}, {applied - given}")
        expected = [result for _, result in rounds if result.contributors]
        for r, rank in living.items():
            self._demand(rank.applied == expected, f"rank {r} applied other rounds, or in another order")
            if r not in self.case.deaths:
                steps, fragments = self.case.steps[r], self.case.fragments
                least = sum(steps) + (len(steps) * fragments if fragments > 1 else 0)
                self._demand(rank.given == least or (rank.given > least and fragments > 1), f"rank {r} left out steps")

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenRuleError(f"{what}; again: {self.case.line}")


def _round_of(ended: Ended) -> int:
    return ended[1].round


def case_of(text: str) -> Case:
    """A case from its JSON."""
    fields = json.loads(text)
    steps = tuple(tuple(part) for part in fields["steps"])
    deaths = tuple(fields.get("deaths", ()))
    return Case(**{**fields, "steps": steps, "choices": tuple(fields["choices"]), "deaths": deaths})


def random_case(draw: random.Random, size: int) -> Case:
    """A case of so many ranks, whose events come in the order that its seed draws; in every second one ranks die."""
    meetings, dying = draw.randint(1, 3), draw.random() < 0.5
    return Case(
        size=size,
        quorum=draw.choice(["solo", "majority", draw.randint(1, size)]),
        max_staleness=draw.randint(0, 3),
        grace=draw.random() < 0.3,
        seed=draw.randrange(1 << 30),
        steps=tuple(tuple(draw.randint(0, 5) for _ in range(meetings)) for _ in range(size)),
        deaths=tuple(draw.sample(range(size), draw.randint(1, size))) if dying else (),
        rejoin=draw.random() < 0.5,
        fragments=draw.choice([1, 1, 2, 3]),
    )


if __name__ == "__main__":
    print(f"holds: {len(Play(case_of(sys.argv[1])).run().rounds)} rounds")
