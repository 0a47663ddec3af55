"""Plays the protocol on all ranks at once, every event in an order that is drawn, and checks what must always hold.

    python -m partial_collectives.protocol.interleaving '{"size": 3, ...}'

plays one case again, as a failure prints it. No world is needed: a round's collective is a wait for all ranks to have
joined, after which each hears of it in its own time.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from partial_collectives.protocol.events import Action, Grace, Header, Join, Kind, Signal, Stage
from partial_collectives.protocol.machine import Machine
from partial_collectives.protocol.rules import Quorum, Rules

LONGEST = 100_000
"""Events of one case; more mean that it never ends."""


@dataclass(frozen=True)
class Case:
    """steps: gradients that each rank gives between the meetings of all ranks (`synchronize`), one list per rank of
    equal length. choices: which of the events that are possible comes next, each taken modulo their number; after the
    last one it goes on as drawn from the seed.
    """

    size: int
    quorum: Quorum
    max_staleness: int
    grace: bool
    seed: int
    steps: tuple[tuple[int, ...], ...]
    choices: tuple[int, ...] = ()

    @property
    def line(self) -> str:
        """What plays it again."""
        return f"python -m partial_collectives.protocol.interleaving '{json.dumps(asdict(self))}'"


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
    """What a rank brought to the round that it is in, and whom it takes for its coordinator."""

    round: int
    header: Header
    gradients: tuple[tuple[int, int], ...]
    coordinator: int


class Rank:
    """A rank's program, engine and machine. parts: steps still to make before each meeting, then to the end."""

    def __init__(self, machine: Machine, parts: Sequence[int]) -> None:
        self.machine = machine
        self.parts = list(parts)
        self.given = 0
        self.acc: list[tuple[int, int]] = []
        self.results: list[Applied] = []  # to be applied
        self.applied: list[Applied] = []
        self.doing = "computes"  # computes | waits | meets | ends
        self.entered: Entered | None = None
        self.grace: int | None = None

    @property
    def done(self) -> bool:
        """Nothing is left to do for it."""
        return self.doing == "ends" and self.machine.over


class Play:
    """All ranks of a case, the signals under way, and the round."""

    def __init__(self, case: Case, machine: type[Machine] = Machine) -> None:
        self.case = case
        rules = Rules(case.quorum, case.max_staleness, case.grace, case.seed)
        self.ranks = [Rank(machine(rank, case.size, rules), case.steps[rank]) for rank in range(case.size)]
        self.signals: Counter[tuple[int, int, Kind, int]] = Counter()  # source, target, kind, round
        self.rounds: list[tuple[list[Header], Applied]] = []  # whose collective is over
        self.events = 0
        self._draw = random.Random(case.seed)

    def run(self) -> Play:
        """Plays it to its end; raises BrokenRuleError."""
        while not all(rank.done for rank in self.ranks):
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
        for number, rank in enumerate(self.ranks):
            if rank.doing == "computes":
                events.append(partial(self._step, number))
            if rank.grace is not None:
                events.append(partial(self._grace_over, number))
            if rank.entered is not None and rank.machine.round < len(self.rounds):
                events.append(partial(self._complete, number))
        for signal in self.signals:
            events.append(partial(self._deliver, signal, again=False))
        if self.signals:
            events.append(partial(self._deliver, next(iter(self.signals)), again=True))
        return events

    def _step(self, number: int) -> None:
        """The program of a rank goes on from where it is: a gradient, a meeting or the end."""
        rank = self.ranks[number]
        if rank.parts[0] == 0:
            rank.parts.pop(0)
            rank.doing = "meets" if rank.parts else "ends"
            rank.results, applied = [], rank.results
            rank.applied += applied
            self._do(number, rank.machine.rested(Stage.PAUSED if rank.parts else Stage.FINISHED))
            return
        rank.parts[0] -= 1
        rank.acc.append((number, rank.given))
        rank.given += 1
        behind = bool(rank.results)
        rank.doing = "computes" if behind else "waits"
        rank.applied += rank.results
        rank.results = []
        self._do(number, rank.machine.deposited(behind=behind))

    def _complete(self, number: int) -> None:
        rank = self.ranks[number]
        headers, result = self.rounds[rank.machine.round]
        rank.entered = None
        if result.contributors:
            rank.results.append(result)
        meetings = rank.machine.meetings
        actions = rank.machine.completed(headers)
        if rank.doing == "waits" and rank.results:
            rank.doing = "computes"
        if rank.doing in ("meets", "ends"):  # results are applied as they come
            rank.applied += rank.results
            rank.results = []
        if rank.doing == "meets" and rank.machine.meetings > meetings:
            rank.doing = "computes"
        self._do(number, actions)

    def _grace_over(self, number: int) -> None:
        rank = self.ranks[number]
        round_, rank.grace = rank.grace, None
        assert round_ is not None
        self._do(number, rank.machine.grace_over(round_))

    def _deliver(self, signal: tuple[int, int, Kind, int], *, again: bool) -> None:
        source, target, kind, round_ = signal
        if not again:
            self.signals[signal] -= 1
            if not self.signals[signal]:
                del self.signals[signal]
        self._do(target, self.ranks[target].machine.heard(source, kind, round_))
        if again:
            self.events += 1  # so that it is not repeated for ever

    def _do(self, number: int, actions: Sequence[Action]) -> None:
        rank = self.ranks[number]
        for action in actions:
            if isinstance(action, Signal):
                self.signals[number, action.peer, action.kind, action.round] += 1
            elif isinstance(action, Grace):
                rank.grace = action.round
            else:
                self._enter(number, action)

    def _enter(self, number: int, join: Join) -> None:
        rank = self.ranks[number]
        self._demand(rank.entered is None, f"rank {number} enters round {join.round} before the last is over")
        self._demand(join.round == len(self.rounds), f"rank {number} enters round {join.round} out of turn")
        self._demand(join.contributes == bool(rank.acc), f"rank {number} says the wrong thing of what it brings")
        stage = {"meets": Stage.PAUSED, "ends": Stage.FINISHED}.get(rank.doing, Stage.RUNNING)
        self._demand(join.stage is stage, f"rank {number} is {stage.name}, but says {join.stage.name}")
        header = Header(join.stage, join.contributes, join.fresh)
        rank.entered = Entered(join.round, header, tuple(rank.acc), rank.machine.coordinator)
        rank.acc = []
        entered = [other.entered for other in self.ranks if other.entered and other.entered.round == join.round]
        if len(entered) == self.case.size:
            self._collective_over(entered)

    def _collective_over(self, entered: Sequence[Entered]) -> None:
        headers = [one.header for one in entered]
        drawn = {one.coordinator for one in entered}
        self._demand(len(drawn) == 1, f"ranks draw different coordinators: {drawn}")
        gradients = tuple(gradient for one in entered for gradient in one.gradients)
        bring = tuple(r for r, header in enumerate(headers) if header.contributes)
        fresh = tuple(r for r, header in enumerate(headers) if header.fresh)
        self.rounds.append((headers, Applied(len(self.rounds), gradients, bring, fresh, drawn.pop())))
        self._check_round(headers, fresh)

    def _check_round(self, headers: Sequence[Header], fresh: Sequence[int]) -> None:
        """Its quorum was there, and nobody has stayed away too long."""
        case, (_, result) = self.case, self.rounds[-1]
        rested = {r for r, header in enumerate(headers) if header.stage is not Stage.RUNNING}
        here = set(fresh) | rested
        if case.quorum == "majority":
            self._demand(result.coordinator in here, f"round {result.round} began without rank {result.coordinator}")
        else:
            needed = min(1 if case.quorum == "solo" else int(case.quorum), case.size)
            self._demand(len(here) >= needed, f"round {result.round} began with {len(here)} of {needed}")
        for r in range(case.size):
            away = 0
            for past, _ in reversed(self.rounds):
                if past[r].contributes or past[r].stage is not Stage.RUNNING:
                    break
                away += 1
            self._demand(away <= case.max_staleness, f"rank {r} missed {away} rounds in a row")

    def _check_end(self) -> None:
        given = Counter((r, step) for r, rank in enumerate(self.ranks) for step in range(rank.given))
        applied = Counter(gradient for _, result in self.rounds for gradient in result.gradients)
        self._demand(all(not rank.acc for rank in self.ranks), "gradients are left behind")
        self._demand(given == applied, f"lost or doubled: {given - applied}, {applied - given}")
        expected = [result for _, result in self.rounds if result.contributors]
        for r, rank in enumerate(self.ranks):
            self._demand(rank.applied == expected, f"rank {r} applied other rounds, or in another order")
            self._demand(rank.given == sum(self.case.steps[r]), f"rank {r} did not make all of its steps")

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenRuleError(f"{what}; again: {self.case.line}")


def case_of(text: str) -> Case:
    """A case from its JSON."""
    fields = json.loads(text)
    steps = tuple(tuple(part) for part in fields["steps"])
    return Case(**{**fields, "steps": steps, "choices": tuple(fields["choices"])})


def random_case(draw: random.Random, size: int) -> Case:
    """A case of so many ranks, whose events come in the order that its seed draws."""
    meetings = draw.randint(1, 3)
    return Case(
        size=size,
        quorum=draw.choice(["solo", "majority", draw.randint(1, size)]),
        max_staleness=draw.randint(0, 3),
        grace=draw.random() < 0.3,
        seed=draw.randrange(1 << 30),
        steps=tuple(tuple(draw.randint(0, 5) for _ in range(meetings)) for _ in range(size)),
    )


if __name__ == "__main__":
    print(f"holds: {len(Play(case_of(sys.argv[1])).run().rounds)} rounds")
