"""Drives the protocol on one rank: signals and collectives in, rounds out, beside whatever the rank computes."""

from __future__ import annotations

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
from partial_collectives.rounds.schedule import partial_round
from partial_collectives.stragglers.lateness import Arrivals, Lateness

KINDS = 8
MOST_BEGAN = 21


class ToItself(IntEnum):
    """Signals of a rank to itself: its round's collective is over, or has failed; its grace is; it gives up."""

    OVER = 2
    FAILED = 3
    GRACE_OVER = 4
    GIVES_UP = 5


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
        self._why, self._broken = "", False
        self._data = comm.duplicate()
        with self._lock:  # signals of faster ranks may come before this one has returned
            self._signals = comm.signals(self._on_signal)

    def deposit(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Gives a gradient, which the next round takes that this rank enters."""
        copies, finite = weighted_copy(tensors, weight)
        with self._lock:
            self._raise_broken()
            self._arrivals.arrived(self._comm.clock())
            self.deposits.add(copies, weight, finite)
            self._do(self.machine.deposited(behind=bool(self.results)))

    def rest(self, stage: Stage) -> None:
        """This rank has no more steps for now, or none at all."""
        with self._lock:
            self._raise_broken()
            self._do(self.machine.rested(stage))

    def wait(self, over: Callable[[], bool]) -> None:
        """Until something holds, which is looked at after every signal; raises what has gone wrong meanwhile.

        Who waits longer than the communicator's time-out raises: a rank is not merely slow then.
        """
        timeout = self._comm.timeout
        try:
            self._signals.wait_until(lambda: over() or self._is_broken(), timeout)
        except TimeoutError as error:
            self._why = f"timed out after {timeout:g} s: {self._waits()}"
            raise CollectiveError(self._why) from error
        with self._lock:
            self._raise_broken()

    def take(self) -> list[PartialResult]:
        """The rounds that are over and were not taken yet."""
        with self._lock:
            taken = list(self.results)
            self.results.clear()
        return taken

    def give_up(self, why: str) -> None:
        """This rank cannot go on: the others raise that it says so."""
        self._why = why
        with suppress(CollectiveError):
            self._signals.send(self._comm.rank, ToItself.GIVES_UP)

    def close(self) -> None:
        """Ends signals and collectives, on all ranks; after the last round."""
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
        with self._lock:
            if kind == ToItself.GIVES_UP:
                raise CollectiveError(self._why)
            if kind == ToItself.FAILED:
                self._broken = True
            elif kind == ToItself.OVER:
                self._completed()
            elif kind == ToItself.GRACE_OVER:
                self._do(self.machine.grace_over(round_))
            else:
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
        self._signals.remind(self._seconds_of_grace(), KINDS * grace.round + ToItself.GRACE_OVER)

    def _join(self, join: Join) -> None:
        deposits = self.deposits
        self.began.append(self._comm.clock())
        late, late_round = self._arrivals.began(join.round, self.began[-1], fresh=join.fresh)
        header = Header(
            join.stage, join.contributes, join.fresh, deposits.weight, deposits.count, deposits.finite, late, late_round
        )
        schedule = self._round(join.round, header, deposits.take())
        self._work = start(schedule, self._data, facts=self._facts)

    def _round(self, round_: int, header: Header, tensors: list[Tensor] | None) -> Schedule[None]:
        """The collective of a round, which says to this rank that it is over."""
        rank, size = self._comm.rank, self._comm.size
        try:
            self._outcome = yield from partial_round(header, tensors, self.deposits.like, rank, size)
        except BaseException:
            with suppress(CollectiveError):
                self._signals.send(rank, KINDS * round_ + ToItself.FAILED)
            raise
        self._signals.send(rank, KINDS * round_ + ToItself.OVER)

    def _completed(self) -> None:
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

    def _is_broken(self) -> bool:
        """Whether waiting is in vain. A rank that is gone is waited for in the round's collective, which then fails
        alike on all ranks."""
        with self._lock:
            if not self._broken and not self.machine.over and self._signals.departed:
                self._do(self.machine.heard(self._comm.rank, Kind.BEGIN, self.machine.round))
            ended = self._work is not None and self._work.ended is not None
            if self.machine.joined and ended and self._outcome is None:  # before its first round
                self._broken = True
            return self._broken

    def _waits(self) -> str:
        machine = self.machine
        whom = "all others to end it" if machine.joined else f"rank {machine.coordinator} to begin it"
        return f"rank {machine.rank} waits in partial round {machine.round} for {whom}"

    def _raise_broken(self) -> None:
        if self._why:
            raise CollectiveError(self._why)
        if self._broken and self._work is not None:
            self._work.wait()
