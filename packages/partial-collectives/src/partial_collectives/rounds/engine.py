"""Drives the protocol on one rank: signals and collectives in, rounds out, beside whatever the rank computes."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, cast

from communicators import CollectiveError, Communicator, Schedule, Work, start
from torch import Tensor

from partial_collectives.protocol.events import Action, Grace, Header, Join, Kind, Signal, Stage
from partial_collectives.protocol.machine import Machine
from partial_collectives.protocol.rules import Rules
from partial_collectives.result import PartialResult
from partial_collectives.rounds.deposits import Deposits, weighted_copy
from partial_collectives.rounds.pulse import Pulse
from partial_collectives.rounds.schedule import partial_round
from partial_collectives.stragglers.lateness import Arrivals, Lateness

KINDS = 16
MOST_BEGAN = 21


class Between(IntEnum):
    """Signals between engines beside the protocol's: to itself, that a round's collective or a grace is over; whether a
    rank lives, and that it does; that it closes."""

    OVER = 4
    GRACE_OVER = 5
    LIVES = 6
    LIVE = 7
    CLOSES = 8


class Engine:
    """One rank's end of the rounds.

    Everything that happens comes as a signal, also that the collective of a round is over, and is dealt with by one
    thread at a time: by the process's background engine, or by the loop of a simulated world.
    like: 1-D tensors in host memory, where all of this takes place. seconds_of_grace: how long a round waits once its
    quorum is there. results: rounds that were not taken yet; totals are lists of 1-D tensors. began: when this rank
    entered the last rounds, by the communicator's clock.
    """

    def __init__(
        self,
        comm: Communicator,
        rules: Rules,
        like: Sequence[Tensor],
        seconds_of_grace: Callable[[], float],
        facts: str,
    ) -> None:
        self.machine, self.deposits = Machine(comm.rank, comm.size, rules), Deposits(like)
        self.results: deque[PartialResult] = deque()
        self.lateness = Lateness(comm.size)
        self.began: deque[float] = deque(maxlen=MOST_BEGAN)
        self._arrivals = Arrivals()
        self._comm, self._facts, self._seconds_of_grace = comm, facts, seconds_of_grace
        self._lock = threading.RLock()
        self._work: Work[None] | None = None
        self._outcome: tuple[list[Header], list[Tensor]] | None = None
        self._graced = -1
        self._others = frozenset(range(comm.size)) - {comm.rank}
        self._answered: set[int] = set()
        self._closing = frozenset[int]()
        self._data = comm.duplicate()
        with self._lock:  # signals of faster ranks may come before this one has returned
            self._signals = comm.signals(self._on_signal)

    def deposit(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Gives a gradient, which the next round takes that this rank enters."""
        copies, finite = weighted_copy(tensors, weight)
        with self._lock:
            self._signals.check()
            self._arrivals.arrived(self._comm.clock())
            self.deposits.add(copies, weight, finite)
            self._do(self.machine.deposited(behind=bool(self.results)))

    def rest(self, stage: Stage) -> None:
        """This rank has no more steps for now, or none at all."""
        with self._lock:
            self._signals.check()
            self._do(self.machine.rested(stage))

    def wait(self, over: Callable[[], bool]) -> None:
        """Until something holds, which is looked at after every signal; raises what has gone wrong meanwhile.

        A rank that is slow is waited for as long as it takes, but its engine must answer.
        """
        pulse = Pulse(self._comm.timeout, lambda peer: self._signals.send(peer, Between.LIVES), self._answered)
        while True:
            try:
                return self._signals.wait_until(lambda: self._looks(over), pulse.seconds)
            except TimeoutError:
                if self._comm.size == 1:
                    raise
                if in_vain := pulse.feel(self._others - self._signals.departed, self._waits()):
                    self._signals.fail(in_vain)

    def take(self) -> list[PartialResult]:
        """The rounds that are over and were not taken yet."""
        with self._lock:
            taken = list(self.results)
            self.results.clear()
        return taken

    def give_up(self, why: str) -> None:
        """This rank cannot go on: all others raise why, unless something else went wrong before."""
        self._signals.fail(why)

    def close(self) -> None:
        """Ends signals and collectives, on all ranks; after the last round, and once all ranks have come to it."""
        self._signals.send_all(Between.CLOSES)
        self.wait(lambda: self._others <= self._closing | self._signals.departed)
        self._signals.close()
        if self._work is not None:
            self._work.wait()
        self._data.close()

    def state(self) -> dict[str, Any]:
        """Between two rounds."""
        self.wait(lambda: not self.machine.joined)
        with self._lock:
            results = [dict(vars(result)) for result in self.results]
            return {"machine": self.machine.state(), "deposits": self.deposits.state(), "results": results}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` gave; before the first round."""
        with self._lock:
            self.machine.restore(state["machine"])
            self.deposits.restore(state["deposits"])
            self.results = deque(PartialResult(**result) for result in state["results"])

    def _on_signal(self, source: int, value: int) -> None:
        round_, kind = divmod(value, KINDS)
        self._answered.add(source)
        with self._lock:
            if kind == Between.OVER:
                self._completed()
            elif kind == Between.GRACE_OVER:
                self._do(self.machine.grace_over(round_))
            elif kind == Between.LIVES:
                self._signals.send(source, Between.LIVE)
            elif kind == Between.CLOSES:
                self._closing |= {source}
            elif kind != Between.LIVE:
                self._do(self.machine.heard(source, Kind(kind), round_))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Signal):
                self._signals.send(action.peer, KINDS * action.round + action.kind)
            elif isinstance(action, Join):
                self._join(action)
            elif self._graced != action.round:
                self._graced = action.round
                self._remind(action)

    def _remind(self, grace: Grace) -> None:
        self._signals.remind(self._seconds_of_grace(), KINDS * grace.round + Between.GRACE_OVER)

    def _join(self, join: Join) -> None:
        deposits = self.deposits
        self.began.append(self._comm.clock())
        late, late_round = self._arrivals.began(join.round, self.began[-1], fresh=join.fresh)
        header = Header(
            join.stage, join.contributes, join.fresh, deposits.weight, deposits.count, deposits.finite, late, late_round
        )
        self._work = start(
            self._round(header, deposits.take()), self._data, facts=self._facts, timeout=math.inf
        )  # slow ranks are waited for
        self._work.when_over(self._tell_over)

    def _round(self, header: Header, tensors: list[Tensor] | None) -> Schedule[None]:
        rank, size = self._comm.rank, self._comm.size
        self._outcome = yield from partial_round(header, tensors, self.deposits.like, rank, size)

    def _tell_over(self) -> None:
        with suppress(CollectiveError):  # they have failed already
            self._signals.send(self._comm.rank, Between.OVER)

    def _completed(self) -> None:
        work = cast(Work[None], self._work)
        if work.error is not None:
            raise CollectiveError(str(work.error)) from work.error
        headers, totals = cast(tuple[list[Header], list[Tensor]], self._outcome)
        self._outcome, round_ = None, self.machine.round
        actions = self.machine.completed(headers)
        self.lateness.record(headers)
        if totals:
            self.results.append(self._result(round_, headers, totals))
        self._do(actions)

    def _result(self, round_: int, headers: Sequence[Header], totals: list[Tensor]) -> PartialResult:
        def who(says: Callable[[Header], bool]) -> tuple[int, ...]:
            return tuple(rank for rank, header in enumerate(headers) if says(header))

        return PartialResult(
            total=totals,
            round=round_,
            contributors=who(lambda header: header.contributes),
            fresh=who(lambda header: header.fresh),
            staleness=tuple(self.machine.missed),
            deposits=sum(header.deposits for header in headers),
            weight=sum(header.weight for header in headers),
            nonfinite=who(lambda header: not header.finite),
        )

    def _looks(self, over: Callable[[], bool]) -> bool:
        """Whether it holds. A rank that is gone is waited for in the round's collective, which fails alike on all."""
        with self._lock:
            if not self.machine.over and not self.machine.joined and self._signals.departed:
                self._do(self.machine.heard(self._comm.rank, Kind.BEGIN, self.machine.round))
            return over()

    def _waits(self) -> str:
        machine = self.machine
        whom = "all others to end it" if machine.joined else f"rank {machine.coordinator} to begin it"
        return f"rank {machine.rank} waits in partial round {machine.round} for {whom}"
