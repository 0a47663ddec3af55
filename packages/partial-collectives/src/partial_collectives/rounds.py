"""Drives the protocol on one rank: signals and collectives in, rounds out, beside whatever the rank computes."""

import math
import statistics
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from communicators import Attempt, CollectiveError, Communicator, LeftOutError, Schedule, Work, start, tracing
from torch import Tensor

from partial_collectives.collective import Ended, Rounding, partial_round, recovery
from partial_collectives.deposits import Copies, Deposits
from partial_collectives.protocol.events import Action, Header, Join, Kind, LeftOut, Recover, Signal, Stage
from partial_collectives.protocol.machine import Machine
from partial_collectives.protocol.rules import Rules
from partial_collectives.pulse import Pulse
from partial_collectives.result import PartialResult
from partial_collectives.stragglers import Arrivals, Lateness

KINDS = 16
OWN, KNOWN = (Kind.OVER, Kind.GRACE_OVER), frozenset(Kind)
"""Kinds of signals that a rank sends to itself alone, and all that there are."""
MOST_BEGAN = 21
WAITS = 1
"""In place of a round's number, beside `Kind.LIVE`: its sender waits as well."""


class PartialRounds:
    """Rounds of a partial allreduce on one rank.

    Everything that happens comes as a signal, also that the collective of a round is over, and is dealt with by one
    thread at a time: by the process's background engine, or by the loop of a simulated world.
    like: of each fragment, 1-D tensors in host memory, where all of this takes place. bits: of an element on the way,
    None as it is; residuals: of each fragment what rounding has left out, which goes into its next round, of a mean if
    it is `weighted`. grace: how long a round waits once its quorum is there, as a share of the median time between the
    last rounds, or in seconds. results: rounds that were not taken yet; totals are lists of 1-D tensors. began: when
    this rank entered the last rounds, by the communicator's clock. shrinks: whether the others go on where a rank has
    died. given_up: ranks that have not answered, and were left out. name: of this rank, in errors. calls: whether this
    rank asks all to meet; called: whether any has since they have met. changes: of settings on this rank since then,
    as text; None as long as it does not tell.
    """

    def __init__(
        self,
        comm: Communicator,
        rules: Rules,
        like: Sequence[Sequence[Tensor]],
        grace: tuple[float, float],
        facts: str,
        *,
        shrinks: bool,
        bits: int | None = None,
        weighted: bool = False,
    ) -> None:
        self.machine, self.deposits = Machine(comm.rank, comm.size, rules), [Deposits(each) for each in like]
        self._bits, self._weighted = bits, weighted
        self.residuals = [list[Tensor]() if bits is None else _zeros(each) for each in like]
        self.results: deque[PartialResult] = deque()
        self.lateness = Lateness(comm.size)
        self.began: deque[float] = deque(maxlen=MOST_BEGAN)
        self._arrivals = Arrivals()
        self._comm, self._facts, self._grace = comm, facts, grace
        self._lock = threading.RLock()
        self.exchanging = self.waited = 0.0  # seconds, by the communicator's clock
        self._busy, self._since = set[str](), 0.0
        self._shrinks, self._left_out, self.name = shrinks, "", f"rank {comm.rank}"
        self.given_up = set[int]()
        self._collective: Attempt | Work[Any] | None = None  # a call of all ranks, unless others go on without some
        self._value: Any = None  # of the last collective that is over
        self._number = 0  # of this rank's collectives, so that what one says is not taken for the next one's word
        self._brought: Deposits | None = None  # to the round under way
        self._last: Ended | None = None  # which those may lack that have not ended it when another rank dies
        self._at_meeting: dict[str, Any] | None = None  # the machine's state
        self._graced, self._leaving = -1, 0  # rounds that this rank leaves for later
        self._others = frozenset(range(comm.size)) - {comm.rank}
        self.calls = self.called = False
        self.changes: str | None = None
        self._answered, self._waiting = set[int](), set[int]()
        self._closing = frozenset[int]()
        self._data = None if shrinks else comm.duplicate()
        with self._lock:  # signals of faster ranks may come before this one has returned
            self._signals = comm.signals(self._on_signal)

    def deposit(self, copies_of: Callable[[int], tuple[Copies, float]], leaving: int) -> None:
        """Gives a gradient to the next round, and to fragments of rounds that this rank has missed.

        copies_of: of a fragment, and their weight. leaving: how many rounds are to be taken before.
        """
        with self._lock:  # or the rounds would go on meanwhile
            self._check()
            given = {fragment: copies_of(fragment) for fragment in self.machine.next_fragments()}
            self._at_meeting = None
            self._arrivals.arrived(self._comm.clock())
            for fragment, ((copies, finite), weight) in given.items():
                self.deposits[fragment].add(copies, weight, finite)
            self._leaving = leaving
            self._do(self.machine.deposited(behind=len(self.results) > leaving))

    def wait_for_one(self) -> None:
        """Waits for a round that was not taken yet, where there is none; not where this rank has given nothing."""
        with self._lock:
            self._check()
            actions = None if self.results else self.machine.waits()
            self._do(actions or [])
        if actions is not None:
            self.wait(lambda: bool(self.results))

    def rest(self, stage: Stage, last: Mapping[int, tuple[Copies, float]]) -> None:
        """Notes that this rank has no more steps for now, or none at all.

        last: what it still gives, by fragment, and its weight.
        """
        with self._lock:
            self._check()
            self._at_meeting = None
            for fragment, ((copies, finite), weight) in last.items():
                self.deposits[fragment].add(copies, weight, finite)
            self._do(self.machine.rested(stage, last))

    def wait(self, over: Callable[[], bool]) -> None:
        """Waits until a condition holds, looked at after every signal; raises what has gone wrong meanwhile.

        A slow rank is waited for as long as it takes, but its engine must answer.
        """
        ask = partial(self._signals.send, value=Kind.LIVES)
        pulse = Pulse(self._comm.rank, self._comm.timeout, ask, self._answered, self._waiting)
        self._count("waits", True)
        try:
            while not self._waited(over, pulse.seconds):
                if silent := pulse.feel(self._others - self._gone(), self._needs(), self._waits()):
                    self._give_up_on(silent, pulse.silence(silent[0]))
        finally:
            self._count("waits", False)
        self._check()

    def _waited(self, over: Callable[[], bool], seconds: float) -> bool:
        """Waits for so long at most; returns whether the condition holds."""
        try:
            with tracing.labelled("wait"):
                self._signals.wait_until(lambda: self._looks(over), seconds)
        except TimeoutError:
            if self._comm.size == 1:
                raise
            return False
        return True

    def seconds(self) -> tuple[float, float]:
        """Seconds so far in which a round was under way or waited for, and those of them in which this rank waited."""
        with self._lock:
            self._count("", False)
            return self.exchanging, self.waited

    def _count(self, what: str, begins: bool) -> None:
        """Adds up seconds until now, in which what has begun goes on."""
        with self._lock:
            now = self._comm.clock()
            self.exchanging += (now - self._since) * bool(self._busy)
            self.waited += (now - self._since) * ("waits" in self._busy)
            self._since = now
            (self._busy.add if begins else self._busy.discard)(what)

    def _give_up_on(self, silent: Sequence[int], why: str) -> None:
        """Goes on without ranks that do not answer, where they hear of it from their next group; else fails."""
        if not (self._shrinks and self._comm.hasty):
            self._signals.fail(why)
            return
        self.given_up |= set(silent)
        with self._lock:
            for rank in silent:
                self._do(self.machine.gone(rank))

    def take(self, *, meeting: int | None = None, leaving: int = 0) -> list[PartialResult]:
        """Rounds that are over and were not taken yet; up to the meeting of this number, once that has been.

        leaving: how many of the last ones stay for a later call, if there are two or more.
        """
        with self._lock:
            met = meeting is not None and self.machine.meetings >= meeting
            self._leaving = leaving
            first = list(self.results)[: max(1, len(self.results) - leaving)]
            taken = [result for result in first if not met or result.round <= self.machine.met]
            self.results = deque(list(self.results)[len(taken) :])
        return taken

    def give_up(self, why: str) -> None:
        """Gives up this rank: all others raise why, unless something else went wrong before, or go on without it."""
        if self._shrinks:
            self._signals.leave(why)
            self._abandon()  # afterwards: nobody hears here any more that it is over
        else:
            self._signals.fail(why)

    def close(self) -> None:
        """Ends signals and collectives, on all ranks; after the last round, and once all ranks have come to it."""
        self._signals.send_all(Kind.CLOSES)
        self.wait(lambda: self._others <= self._closing | self._gone())
        if self._shrinks:
            self._abandon()
        self._signals.close()
        if self._data is not None:
            self._data.close()

    def state(self) -> dict[str, Any]:
        """State between two rounds: as of the last meeting, where this rank has given nothing since, else now."""
        self.wait(lambda: self._at_meeting is not None or (not self.machine.joined and not self.machine.recovering))
        with self._lock:
            if self._at_meeting is not None:  # others may have gone on, and rounds with them
                return {**self._at_meeting, "deposits": [one.state() for one in self.deposits], "results": []}
            results = [dict(vars(result)) for result in self.results]
            return {**self._between(), "deposits": [one.state() for one in self.deposits], "results": results}

    def restore(self, state: Mapping[str, Any], *, joins: bool = False) -> None:
        """Restores what `state` gave, before the first round. joins: a peer's state, whose deposits stay there."""
        with self._lock:
            owes_nothing = {"held": [], "waits": False, "given": state["machine"]["round"] - 1}
            peers = {**owes_nothing, "stage": Stage.RUNNING} if joins else {}
            self.machine.restore({**state["machine"], **peers})
            if not joins:
                for deposits, theirs in zip(self.deposits, state["deposits"], strict=True):
                    deposits.restore(theirs)
                self.residuals, self._leaving = _copies(state["residuals"]), state["leaving"]
            self.results = deque(PartialResult(**result) for result in state["results"])

    def go_on(self) -> None:
        """Goes on after `restore`, once it was called on all ranks."""
        with self._lock:
            self._do(self.machine.rested(self.machine.stage))

    def _between(self) -> dict[str, Any]:
        """State of this rank in the rounds, but for what it has given since the last one."""
        return {"machine": self.machine.state(), "residuals": _copies(self.residuals), "leaving": self._leaving}

    def _on_signal(self, source: int, value: int) -> None:
        round_, kind = divmod(value, KINDS)
        alien = kind in OWN and source != self._comm.rank
        if kind not in KNOWN or alien or (kind == Kind.GONE and not self._shrinks):
            raise CollectiveError(
                f"rank {source} sent {value}, which no rank says to another in partial rounds: do all ranks run the "
                "same version?"
            )
        self._answered.add(source)
        waits = kind == Kind.LIVES or (kind == Kind.LIVE and round_ == WAITS)
        (self._waiting.add if waits else self._waiting.discard)(source)
        with self._lock:
            if kind == Kind.OVER:
                if round_ == self._number:
                    self._collective_over()
            elif kind == Kind.GRACE_OVER:
                self._do(self.machine.grace_over(round_))
            elif kind == Kind.LIVES:
                self._signals.send(source, KINDS * (WAITS if "waits" in self._busy else 0) + Kind.LIVE)
            elif kind == Kind.CLOSES:
                self._closing |= {source}
            elif kind != Kind.LIVE:
                self._do(self.machine.heard(source, Kind(kind), round_))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Signal):
                self._signals.send(action.peer, KINDS * action.round + action.kind)
            elif isinstance(action, Join):
                self._join(action)
            elif isinstance(action, Recover):
                self._recover()
            elif isinstance(action, LeftOut):
                self._left_out = f"{self.name} was left out: others have lost the connection to it"
            elif self._graced != action.round:
                self._graced = action.round
                self._signals.remind(self._seconds_of_grace(), KINDS * action.round + Kind.GRACE_OVER)

    def _seconds_of_grace(self) -> float:
        share, seconds = self._grace
        apart = [later - earlier for earlier, later in pairwise(self.began)]
        return share * statistics.median(apart) if share and apart else seconds

    def _join(self, join: Join) -> None:
        self.began.append(self._comm.clock())
        late, late_round = self._arrivals.began(join.round, self.began[-1], fresh=join.fresh)
        fragment = self._fragment
        taken = self._brought = self.deposits[fragment]
        self.deposits[fragment] = Deposits(taken.like)
        brings = (taken.weight, taken.count, taken.finite)
        changes = self.changes
        settings = 0 if changes is None else zlib.crc32(changes.encode(), 1)
        header = Header(join.stage, join.contributes, join.fresh, *brings, late, late_round, self.calls, settings)
        said = f"{self.name} has changed {changes or 'nothing'}"
        rounding = None
        if self._bits is not None:
            rounding = Rounding(self._bits, self.residuals[fragment], self._weighted)
        own = taken.tensors or _zeros(taken.like)
        self._begin(partial(partial_round, header, own, rounding, said), f"round {join.round}")

    def _abandon(self) -> None:
        """Cancels the collective under way, whose end is of no use to this rank any more."""
        if isinstance(self._collective, Attempt):
            self._collective.cancel()

    def _recover(self) -> None:
        self._abandon()
        last, ranks, like = self._last, self._comm.size, self.deposits[self._fragment].like
        self._begin(partial(recovery, self.machine.round, last, ranks, like), "what is over")

    def _begin(self, make: Callable[[int, int], Schedule[Any]], what: str) -> None:
        """Begins a collective among the ranks that are left; make: gives the schedule of a position among so many."""
        members = sorted(self.machine.members)
        self._number += 1
        self._count("round", True)
        told = self._kept(make(members.index(self._comm.rank), len(members)), self._number)
        if self._data is None:
            self._collective = self._signals.attempt(told, members, facts=f"{self._facts}: {what} of {members}")
        else:  # slow ranks are waited for, and a death fails it on all ranks alike
            self._collective = start(told, self._data, facts=self._facts, timeout=math.inf)
        self._collective.when_over(partial(self._tell_over, self._number))

    def _kept(self, schedule: Schedule[Any], number: int) -> Schedule[None]:
        result = yield from schedule
        if number == self._number:
            self._value = result

    def _tell_over(self, number: int) -> None:
        with suppress(CollectiveError):  # they have failed already
            self._signals.send(self._comm.rank, KINDS * number + Kind.OVER)

    def _collective_over(self) -> None:
        collective = self._collective
        self._count("round", False)
        if isinstance(collective, Attempt) and collective.lost is not None:
            self._do(self.machine.gone(collective.lost))
        elif collective is not None and collective.error is not None:
            raise CollectiveError(str(collective.error)) from collective.error
        elif not self.machine.recovering:
            headers, totals, residual = self._value
            self._end_round(self._of_all(headers, totals), self.machine.completed, residual)
        elif self._value is not None:
            residual = _zeros(self.residuals[self._fragment]) if self._value[1] else None  # what it was nobody knows
            self._end_round(self._value, self.machine.recovered, residual)
        else:
            if self.machine.joined and self._brought is not None:
                self.deposits[self._fragment].put_back(self._brought)
            self._brought = None
            self._do(self.machine.recovered(None))

    def _of_all(self, headers: Sequence[Header], totals: list[Tensor]) -> Ended:
        """Headers of all ranks, also of those that are gone, and the totals."""
        of = dict(zip(sorted(self.machine.members), headers, strict=True))
        return [of.get(rank, Header(Stage.GONE)) for rank in range(self._comm.size)], totals

    def _end_round(self, ended: Ended, tell: Callable[..., list[Action]], residual: list[Tensor] | None) -> None:
        headers, totals = ended
        if residual is not None:
            self.residuals[self._fragment] = residual
        round_, self._brought = self.machine.round, None
        if self._shrinks:
            self._last = headers, [total.clone() for total in totals]  # the user may change what he gets
        meetings = self.machine.meetings
        actions = tell(headers, behind=len(self.results) + 1 > self._leaving)
        met = self.machine.meetings > meetings
        self.called = not met and (self.called or any(header.calls for header in headers))
        if met:  # who has finished changes nothing any more
            self.changes = "" if self.changes is not None and self.machine.stage is Stage.FINISHED else None
        if met and not self.machine.over:
            self._at_meeting = self._between()
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
            fragment=round_ % self.machine.rules.fragments,
            contributors=who(lambda header: header.contributes),
            fresh=who(lambda header: header.fresh),
            staleness=tuple(self.machine.missed),
            deposits=sum(header.deposits for header in headers),
            weight=sum(header.weight for header in headers),
            nonfinite=who(lambda header: not header.finite),
            members=who(lambda header: header.stage is not Stage.GONE),
        )

    @property
    def _fragment(self) -> int:
        """Fragment of the current round."""
        return self.machine.round % self.machine.rules.fragments

    def _gone(self) -> frozenset[int]:
        """Ranks that have departed, or are gone as others tell."""
        return self._signals.departed | self._others - self.machine.members

    def _needs(self) -> Collection[int]:
        """Ranks that this one waits for by itself, as it would not hear of them from others."""
        if self.machine.over:
            return self._others - self._closing
        if self._collective is not None and (self.machine.joined or self.machine.recovering):
            return self._collective.peers
        return {self.machine.coordinator}

    def _looks(self, over: Callable[[], bool]) -> bool:
        """Whether the condition holds, or waiting is in vain. A rank that has departed and has not closed is gone.

        Without `shrinks` such a rank is waited for in the round's collective, which fails alike on all ranks.
        """
        with self._lock:
            gone = self._signals.departed - self._closing
            if self._shrinks:
                for rank in sorted(gone):
                    self._do(self.machine.gone(rank))
            elif gone and not self.machine.over and not self.machine.joined:
                self._do(self.machine.heard(self._comm.rank, Kind.BEGIN, self.machine.round))
            return bool(self._left_out) or over()

    def _check(self) -> None:
        self._signals.check()
        if self._left_out:
            raise (LeftOutError if self._comm.hasty else CollectiveError)(self._left_out)

    def _waits(self) -> str:
        machine = self.machine
        whom = "all others to end it"
        if not machine.joined:
            whom = f"rank {machine.coordinator} to begin it, which must synchronize() before it waits elsewhere"
        return f"rank {machine.rank} waits in partial round {machine.round} for {whom}"


def _copies(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[one.clone() for one in each] for each in lists]


def _zeros(like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(one) for one in like]
