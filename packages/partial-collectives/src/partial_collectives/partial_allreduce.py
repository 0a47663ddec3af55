"""`PartialAllreduce`: sums over ranks that do not wait for the last one, and lose nothing of it."""

import logging
import math
import statistics
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import GeneratorType
from typing import Any, Literal, Self, TypedDict

import torch
from communicators import (
    Attempt,
    CollectiveError,
    LeftOutError,
    Schedule,
    Stats,
    Work,
    as_communicator,
    run,
    schedules,
    start,
    tracing,
)
from replicas import wholly
from torch import Tensor

from partial_collectives.collective import BITS, Ended, Rounding, partial_round, recovery
from partial_collectives.deposits import Deposits, Given
from partial_collectives.like import Like, Tensors, Weighted, check_alike
from partial_collectives.protocol.events import Action, Header, Join, Kind, LeftOut, Recover, Signal, Stage
from partial_collectives.protocol.machine import Machine
from partial_collectives.protocol.rules import MAX_STALENESS, Quorum, check_rules, goes_on_after_death, parsed_grace
from partial_collectives.pulse import Pulse
from partial_collectives.result import PartialResult
from partial_collectives.stragglers import Arrivals, Lateness

KINDS = 16
OWN, KNOWN = (Kind.OVER, Kind.GRACE_OVER), frozenset(Kind)
"""Kinds of signals that a rank sends to itself alone, and all that there are."""
MOST_BEGAN = 21
WAITS = 1
"""In place of a round's number, beside `Kind.LIVE`: its sender waits as well."""

logger = logging.getLogger(__name__)


class RoundSettings(TypedDict, total=False):
    """Keyword arguments of `PartialAllreduce`, which describes them."""

    quorum: Quorum
    max_staleness: int
    grace: float | str
    seed: int
    on_death: Literal["error", "shrink"] | None
    compress: str | None


class PartialAllreduce:
    """Sums of what ranks give, in numbered rounds that begin when a quorum has arrived.

        with PartialAllreduce(gradient, comm, quorum="majority") as partial:
            for _ in range(steps):
                for result in partial.allreduce(compute()):
                    apply(result.total / comm.size)
            for result in partial.finish():
                apply(result.total / comm.size)

    Every rank gets every round once, in order, with the same bits; how often it calls is its own affair. What comes too
    late for a round is added up and goes into the next one: Σ given = Σ applied, whatever the order of events.

    A slow rank is waited for without end. Two objects that are called in turn may wait for each other where ranks
    differ in speed, one rank in a round of this and one in a round of that: make one, with a list. All ranks make it,
    and end it with `finish()` and `close()`.

    Fragments of something large take turns, so that a round sums one of them: round r the (r mod F)-th of F. A rank is
    asked for that of the next round, and for those of rounds that it has missed since it gave last, whose turn comes
    again; it gives all of them what is left before it meets the others. It is asked while the rounds stand still, so
    the function computes, and calls no collective.

        with PartialAllreduce([[x] for x in fragments], comm) as partial:
            for _ in range(steps):
                for result in partial.allreduce(lambda fragment: ([compute(fragment)], 1.0)):
                    apply(result.fragment, result.total)
            for result in partial.finish({fragment: (left(fragment), 1.0) for fragment in range(len(fragments))}):
                apply(result.fragment, result.total)

    Args:
        like: A tensor, or a list of them, of the sizes and dtypes to be summed; alike on all ranks. A list of lists
            is of fragments.
        comm: See `communicators.as_communicator`.
        quorum: "solo": a round begins with the first arrival. "majority": with the arrival of a rank drawn for it, when
            (P + 1)/2 ranks are there in the mean if arrivals are independent of the draw. A number: with so many
            arrivals; over the group of an `Elastic`, with all ranks where there are fewer.
        max_staleness: Rounds in a row that a rank with more steps may miss; then they wait for it.
        grace: Seconds for which a round waits for further arrivals once its quorum is there; "0.5x" is half of the
            median time between the last 20 rounds.
        seed: Seed of the draws, alike on all ranks.
        on_death: "error": all others raise one CollectiveError that names the rank. "shrink": they go on without it;
            what it had brought to a round that any of them has ended is in that round for all, the rest is given up. A
            mean is divided by len(result.members) then. Over gloo and in simulated worlds; ValueError elsewhere. An
            exception inside the context is a death too. None: "shrink" over the group of an `Elastic`, which goes on
            without its dead, else "error".
        compress: Rounds sums to "int8", "int4" or "int2", see `communicators.schedules.quantised_allreduce`; `like` is
            float32 then. What rounding leaves out is a residual of the rank's, and goes into the next round of the
            fragment, whether this rank gives something to it or not: Σ given = Σ applied + Σ residuals. A rank that
            dies takes its residual with it, and in a round that others had ended before they heard of a death the
            rounding of those that had not is given up. Of blocks that are not finite nothing is left for later rounds.
        weighted: Whether totals are divided by the weight of their round, not by a number of ranks. Residuals are then
            of the mean, and each round multiplies them by its weight; one without weight leaves them as they are.

    Attributes:
        comm: The ranks.
        name: Name of this rank in errors, its number by default; may be set.
        given_up: Ranks that have not answered, without which this one has gone on; they may have gone on without it.
        calls: Whether this rank asks all to meet, in each round that it takes part in; may be set.
        called: Whether a rank has asked all to meet, in a round since they last have; the same on all after each round.
        changes: Changes of settings on this rank since ranks last met, as text; None: it does not tell. May be set. All
            raise one CollectiveError, that has the texts of two ranks, in the first round in which ranks tell unlike
            ones. It is None again where they meet; after `finish()` it is "", as nothing changes any more.
        lateness: Ranks that were last, and by how much, as the ranks have told in their rounds.

    Raises:
        TypeError: `like` holds no dense tensors of a dtype that adds: floating, complex, uint8, int8 … int64.
        CollectiveError: Ranks differ in `like` or settings.
        RuntimeError: MPI has no THREAD_MULTIPLE.
    """

    loads_wholly = True  # its engine goes on meanwhile, see `replicas.wholly`

    def __init__(
        self,
        like: Tensors | Sequence[Sequence[Tensor]],
        comm: Any,
        *,
        quorum: Quorum = "majority",
        max_staleness: int = MAX_STALENESS,
        grace: float | str = 0.0,
        seed: int = 0,
        on_death: Literal["error", "shrink"] | None = None,
        compress: str | None = None,
        weighted: bool = False,
    ) -> None:
        self._like = Like(like, compress)
        if not isinstance(weighted, bool):
            raise TypeError(f"weighted is {weighted!r}, expected True or False")
        self.comm = as_communicator(comm)
        rank, size, fragments = self.comm.rank, self.comm.size, len(self._like.fragments)
        outlives_ranks, hasty = self.comm.outlives_ranks, self.comm.hasty
        if hasty and isinstance(quorum, int):
            quorum = min(quorum, size)  # of a group that others may have left
        self._grace = parsed_grace(grace)
        rules = check_rules(quorum, max_staleness, any(self._grace), seed, size, fragments=fragments)
        self._shrinks = shrinks = goes_on_after_death(on_death, outlives_ranks=outlives_ranks, hasty=hasty)
        settings = f"quorum={quorum!r}, {max_staleness=}, {grace=}, {seed=}, {shrinks=}, {weighted=}"
        facts = f"PartialAllreduce({self._like}; {settings}{f', {compress=}' if compress else ''})"
        run(schedules.barrier(rank, size), self.comm, facts=facts)
        self._facts = f"a round (a rank with no more steps calls finish()) of {facts}"
        self._bits, self._weighted = None if compress is None else BITS[compress], weighted
        self._machine, self._deposits = Machine(rank, size, rules), [Deposits(each) for each in self._like.flat()]
        self._residuals = [_zeros(each.like) if compress else list[Tensor]() for each in self._deposits]
        self._open()

    def _open(self) -> None:
        """Begins what goes on beside the caller.

        Everything that happens comes as a signal, also that the collective of a round is over, and is dealt with by one
        thread at a time: by the process's background engine, or by the loop of a simulated world.
        """
        rank, size = self.comm.rank, self.comm.size
        self._results: list[PartialResult] = []  # not taken yet; totals are lists of 1-D tensors
        self.lateness, self._arrivals = Lateness(size), Arrivals()
        self._began: deque[float] = deque(maxlen=MOST_BEGAN)  # when this rank entered the last rounds
        self._lock = threading.RLock()
        self._exchanging = self._waited = 0.0  # seconds, by the communicator's clock
        self._busy, self._since = set[str](), 0.0
        self._left_out, self.name, self.given_up = "", f"rank {rank}", frozenset[int]()
        self._collective: Attempt | Work[Any] | None = None  # a call of all ranks, unless others go on without some
        self._value: Any = None  # of the last collective that is over
        self._number = 0  # of this rank's collectives, so that what one says is not taken for the next one's word
        self._brought: Deposits | None = None  # to the round under way
        self._last: Ended | None = None  # which those may lack that have not ended it when another rank dies
        self._at_meeting: dict[str, Any] | None = None  # the machine's state
        self._graced, self._leaving = -1, 0  # rounds that this rank leaves for later
        self._others = frozenset(range(size)) - {rank}
        self.calls = self.called = False
        self.changes: str | None = None
        self._answered, self._waiting = set[int](), set[int]()
        self._closed, self._closing = False, frozenset[int]()
        self._meeting: Iterator[PartialResult] | None = None  # the last one
        self._data = None if self._shrinks else self.comm.duplicate()
        with self._lock:  # signals of faster ranks may come before this one has returned
            self._signals = self.comm.signals(self._on_signal)
        self._sent_before = self.comm.bytes_sent

    @property
    def round(self) -> int:
        """Number of the current round, and so of the rounds that are over on this rank."""
        return self._machine.round

    @property
    def members(self) -> frozenset[int]:
        """Ranks that this one does not know to be gone."""
        return self._machine.members

    @property
    def complete(self) -> bool:
        """Whether nobody was gone when ranks last met; the same on all ranks that are left."""
        return self._machine.complete

    @property
    def residuals(self) -> list[list[Tensor]]:
        """Residuals of this rank by fragment, left out by rounding: 1-D, none without `compress`. May be set.

        They are a part of `state_dict`; set them before the first round, where others have ended in another object.
        """
        return self._residuals

    @residuals.setter
    def residuals(self, residuals: Sequence[Sequence[Tensor]]) -> None:
        check_alike("residuals", residuals, self._residuals)
        self._residuals = _copies(residuals)

    def allreduce(self, tensor: Tensors | Callable[[int], Weighted], *, weight: float = 1.0) -> list[PartialResult]:
        """Gives weight · tensor, and returns every round that was completed since the last call, at least one.

        Waits for a round only where none is there; else what was given goes into a later one.

        Args:
            tensor: Tensors of the sizes of `like`; they may be changed afterwards. Where there are fragments, a
                function that returns those of the fragment whose number it is given, and their weight; it is called
                once or, after rounds that this rank has missed, for several.
            weight: Factor on the tensor, of which rounds give the sum; not with a function. A whole number where dtypes
                are of integers.

        Returns:
            Rounds in order, each to be applied once.

        Raises:
            TypeError: Something given is no dense tensor, or the weight no number.
            ValueError: Sizes, dtypes or the weight are not as expected.
        """
        self.give(tensor, weight=weight)
        return self.take()

    def give(self, tensor: Tensors | Callable[[int], Weighted], *, weight: float = 1.0, leaving: int = 0) -> None:
        """Does the first half of `allreduce`, after which this rank may go on computing, and give again; see `take`.

        Args:
            tensor: See `allreduce`.
            weight: See `allreduce`.
            leaving: How many rounds this rank has still to take of what it gave before. With more it is late.
        """
        self._refuse_closed("allreduce()")
        if callable(tensor):
            function = tensor
            if weight != 1.0:
                raise ValueError(f"weight is {weight!r} beside a function, which returns the weight of each fragment")
            self._deposit(lambda fragment: self._like.copies(function(fragment), fragment), leaving)
        elif len(self._like.fragments) > 1:
            raise TypeError(f"allreduce() is given {type(tensor).__name__}, expected a function of the fragment")
        else:
            copies = self._like.copies((tensor, weight), 0)
            self._deposit(lambda _: copies, leaving)

    def take(self, *, leaving: int = 0) -> list[PartialResult]:
        """Returns the rounds that were completed since the last call, at least one; none where nothing is under way.

        Args:
            leaving: How many of the last rounds stay for a later call, if there are two or more.
        """
        if leaving < 0:
            raise ValueError(f"leaving is {leaving}, expected a number of rounds, 0 or more")
        with self._lock:
            self._check()
            actions = None if self._results else self._machine.waits()
            self._do(actions or [])
        if actions is not None:
            self._wait(lambda: bool(self._results))
        return self._taken(leaving=leaving)

    def synchronize(self, last: Mapping[int, Weighted] | None = None) -> Iterator[PartialResult]:
        """Meets all ranks that have more steps: yields rounds until one has found nobody running, and all is applied.

        Every such rank calls it, each after as many steps as it likes, and reads it to its end; then all have applied
        the same rounds, and go on. Call it for evaluation, and before a checkpoint.

        Args:
            last: Tensors and their weight, by fragment, that this rank gives before.

        Yields:
            Rounds in order, each to be applied once.
        """
        self._refuse_closed("synchronize()")
        self._meeting = self._rest(Stage.PAUSED, last)
        return self._meeting

    def finish(self, last: Mapping[int, Weighted] | None = None) -> Iterator[PartialResult]:
        """Ends this rank's steps: takes part until all others have none.

        Args:
            last: Tensors and their weight, by fragment, that this rank gives before.

        Yields:
            The rest of the rounds in order, each to be applied once.
        """
        self._refuse_closed("finish()", finishes=True)
        yield from self._rest(Stage.FINISHED, last)

    def close(self) -> None:
        """Closes it, with all other ranks.

        Without `finish()` before, this rank has no more steps from now on, takes part until the others have none, and
        throws the results away.
        """
        if self._closed:
            return
        for _ in self._rest(Stage.FINISHED, None):
            pass
        self._signals.send_all(Kind.CLOSES)
        self._wait(lambda: self._others <= self._closing | self._gone())
        if self._shrinks:
            self._abandon()
        self._signals.close()
        if self._data is not None:
            self._data.close()
        self._closed = True

    def stats(self) -> Stats:
        """Costs of this rank since this object was made; sends no messages.

        Returns:
            Plain numbers for any logger, as `communicators.Stats` describes them. Bytes are those over `comm`, also by
            others that use it; a round is exchanged from the first wait for it, or its beginning, on. And:

            - rounds: Rounds that are over on this rank, from the first of the training on.
            - late_seconds_of_R: Seconds from the beginning of a round to the arrival of rank R, in the median of the
                last rounds, below 0 where it comes early; one for each rank.
            - residual_norm: The 2-norm of the residuals, with `compress`. Takes one pass over them.
        """
        with self._lock:
            self._count("", False)
            exchanging, waited = self._exchanging, self._waited
        numbers = {
            "bytes_sent": self.comm.bytes_sent - self._sent_before,
            "seconds_exchanging": exchanging,
            "seconds_waited": waited,
            "seconds_hidden": exchanging - waited,
            "rounds": self.round,
            **{f"late_seconds_of_{rank}": late for rank, late in self.lateness.by_rank().items()},
        }
        if left := [one for each in self.residuals for one in each]:
            numbers["residual_norm"] = math.hypot(*(float(one.double().norm()) for one in left))
        return Stats.of_group(self.comm, **numbers)

    def state_dict(self) -> dict[str, Any]:
        """State of this rank: gradients in no round yet, rounds that were not returned yet, and where the rounds stand.

        It differs between ranks. A round under way is waited for. The ranks can only go on together from states of
        the same round: take them after `synchronize()`, or when no rank is in a step.
        """
        self._refuse_unread("state_dict()")
        self._wait(lambda: self._at_meeting is not None or not (self._machine.joined or self._machine.recovering))
        with self._lock:
            between, deposits = self._at_meeting, [one.state() for one in self._deposits]
            if between is not None:  # others may have gone on, and rounds with them
                return {**between, "deposits": deposits, "results": []}
            results = [dict(vars(result)) for result in self._results]
            return {**self._between(), "deposits": deposits, "results": results}

    def load_state_dict(self, state: Mapping[str, Any], *, joins: bool = False) -> None:
        """Goes on where `state_dict` was taken; for every rank to call, before its first `allreduce()`.

        Args:
            state: Result of `state_dict`.
            joins: Whether the state is a peer's, for a rank that comes in place of one that has died. What the peer has
                given and is in no round yet stays the peer's to give; its rounds that were not returned yet are
                returned here too.

        Raises:
            TypeError: It is no state.
            ValueError: The state is of another `like`, `compress` or number of ranks, or was damaged; nothing has
                changed.
            CollectiveError: The states of the ranks are of different rounds.
        """
        self.refuse_begun("load_state_dict()")
        with wholly(self, "a PartialAllreduce", state):
            if not joins:
                if (saved := len(state["machine"]["missed"])) != self.comm.size:
                    raise ValueError(
                        f"the state is of {saved} ranks, but these are {self.comm.size}: go on with as many ranks, or "
                        "save after finish(), and make a new one"
                    )
                check_alike("residuals", state["residuals"], self._residuals)
            likes = [one.like for one in self._deposits]
            check_alike("deposits", [one["acc"] for one in state["deposits"]], likes)
            for result in state["results"]:
                check_alike("results", [result["total"]], [likes[result["fragment"]]])
            machine = {name: state["machine"][name] for name in ("round", "seed", "missed", "running", "unfinished")}
            facts = f"going on with partial rounds from {machine}"
            with self._lock:  # before any rank goes on, and its signals come
                self._restore(state, joins=joins)
        run(schedules.barrier(self.comm.rank, self.comm.size), self.comm, facts=facts)
        with self._lock:
            self._do(self._machine.rested(self._machine.stage))

    def begin_at(self, number: int) -> None:
        """Begins with the round of this number; for every rank to call, alike, before its first `allreduce()`."""
        self.refuse_begun("begin_at()")
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"a round's number is {number!r}, expected a whole one from 0 on")
        self._machine.begin_at(number)  # before any rank goes on, and its signals come
        run(schedules.barrier(self.comm.rank, self.comm.size), self.comm, facts=f"beginning at partial round {number}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._give_up(error)
            return
        try:
            self.close()
        except BaseException as failed:
            self._give_up(failed)
            raise

    def refuse_begun(self, what: str) -> None:
        """Refuses what may be done before the first round only.

        Args:
            what: Name of it.

        Raises:
            RuntimeError: There was a round.
        """
        if self._began:
            raise RuntimeError(f"{what} after the first round: call it on a new PartialAllreduce")

    def _refuse_closed(self, what: str, *, finishes: bool = False) -> None:
        if self._closed:
            raise RuntimeError(f"{what} after close(): make a new one, on every rank")
        if not finishes and self._machine.stage is Stage.FINISHED:
            raise RuntimeError(f"{what} after finish(): this rank has said that it has no more steps")
        self._refuse_unread(what)

    def _refuse_unread(self, what: str) -> None:
        """Refuses to go on where ranks have not met: a generator that nobody reads does nothing."""
        if isinstance(self._meeting, GeneratorType) and self._meeting.gi_frame:  # else it was read, or has raised
            raise RuntimeError(
                f"{what} before synchronize() was read to its end: `for result in partial.synchronize():`, and apply it"
            )

    def _give_up(self, error: BaseException) -> None:
        """Gives up this rank: all others raise why, unless something else went wrong before, or go on without it."""
        if self._closed:
            return
        self._closed = True
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        mine = f"rank {self.comm.rank} gave up its partial allreduce: {why}"
        reason = str(error) if isinstance(error, CollectiveError) else mine
        if self._shrinks:
            self._signals.leave(reason)
            self._abandon()  # afterwards: nobody hears here any more that it is over
        else:
            self._signals.fail(reason)

    def _deposit(self, copies_of: Callable[[int], Given], leaving: int) -> None:
        """Gives a gradient to the next round, and to fragments of rounds that this rank has missed."""
        with self._lock:  # or the rounds would go on meanwhile
            self._check()
            given = {fragment: copies_of(fragment) for fragment in self._machine.next_fragments()}
            self._arrivals.arrived(self.comm.clock())
            self._add(given)
            self._leaving = leaving
            self._do(self._machine.deposited(behind=len(self._results) > leaving))

    def _add(self, given: Mapping[int, Given], count: int = 1) -> None:
        self._at_meeting = None
        for fragment, (tensors, weight, finite) in given.items():
            self._deposits[fragment].add(tensors, weight, finite, count)

    def _rest(self, stage: Stage, last: Mapping[int, Weighted] | None) -> Iterator[PartialResult]:
        """Has no more steps for now, or none at all: yields rounds until ranks have met, or all is over."""
        machine = self._machine
        given = {fragment: self._like.copies(one, fragment) for fragment, one in (last or {}).items()}
        if machine.over:
            if given:
                raise RuntimeError(
                    "something is given after the last round: make a new PartialAllreduce, on every rank"
                )
            yield from self._taken()
            return
        meeting = machine.meetings + 1 if stage is Stage.PAUSED else None
        with self._lock:
            self._check()
            self._add(given, count=0)
            self._do(machine.rested(stage, given))

        def over() -> bool:
            return machine.over or (meeting is not None and machine.meetings >= meeting)

        while not over():
            yield from self._taken(meeting)
            self._wait(lambda: bool(self._results) or over())
        yield from self._taken(meeting)

    def _taken(self, meeting: int | None = None, leaving: int = 0) -> list[PartialResult]:
        """Rounds that are over and were not taken yet; up to the meeting of this number, once that has been.

        leaving: how many of the last ones stay for a later call, if there are two or more.
        """
        with self._lock:
            met = meeting is not None and self._machine.meetings >= meeting
            self._leaving = leaving
            first = self._results[: max(1, len(self._results) - leaving)]
            taken = [result for result in first if not met or result.round <= self._machine.met]
            self._results = self._results[len(taken) :]
        return [replace(result, total=self._like.shaped(result)) for result in taken]

    def _wait(self, over: Callable[[], bool]) -> None:
        """Waits until a condition holds, looked at after every signal; raises what has gone wrong meanwhile.

        A slow rank is waited for as long as it takes, but its engine must answer.
        """
        ask = partial(self._signals.send, value=Kind.LIVES)
        pulse = Pulse(self.comm.rank, self.comm.timeout, ask, self._answered, self._waiting)
        self._count("waits", True)
        try:
            while not self._waited_for(over, pulse.seconds):
                if silent := pulse.feel(self._others - self._gone(), self._needs(), self._waits()):
                    self._give_up_on(silent, pulse.silence(silent[0]))
        finally:
            self._count("waits", False)
        self._check()

    def _waited_for(self, over: Callable[[], bool], seconds: float) -> bool:
        """Waits for so long at most; returns whether the condition holds."""
        try:
            with tracing.labelled("wait"):
                self._signals.wait_until(lambda: self._looks(over), seconds)
        except TimeoutError:
            if self.comm.size == 1:
                raise
            return False
        return True

    def _count(self, what: str, begins: bool) -> None:
        """Adds up seconds until now, in which what has begun goes on."""
        with self._lock:
            now = self.comm.clock()
            self._exchanging += (now - self._since) * bool(self._busy)
            self._waited += (now - self._since) * ("waits" in self._busy)
            self._since = now
            (self._busy.add if begins else self._busy.discard)(what)

    def _give_up_on(self, silent: Sequence[int], why: str) -> None:
        """Goes on without ranks that do not answer, where they hear of it from their next group; else fails."""
        if not (self._shrinks and self.comm.hasty):
            self._signals.fail(why)
            return
        self.given_up |= set(silent)
        with self._lock:
            for rank in silent:
                self._do(self._machine.gone(rank))

    def _restore(self, state: Mapping[str, Any], *, joins: bool) -> None:
        """Restores a state, before the first round. joins: a peer's, whose deposits stay there."""
        machine, self._results = state["machine"], [PartialResult(**result) for result in state["results"]]
        if joins:
            machine = {**machine, "stage": Stage.RUNNING, "held": [], "waits": False, "given": machine["round"] - 1}
        else:
            self._residuals, self._leaving = _copies(state["residuals"]), state["leaving"]
            for deposits, theirs in zip(self._deposits, state["deposits"], strict=True):
                deposits.restore(theirs)
        self._machine.restore(machine)

    def _between(self) -> dict[str, Any]:
        """State of this rank in the rounds, but for what it has given since the last one."""
        return {"machine": self._machine.state(), "residuals": _copies(self._residuals), "leaving": self._leaving}

    def _on_signal(self, source: int, value: int) -> None:
        round_, kind = divmod(value, KINDS)
        alien = kind in OWN and source != self.comm.rank
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
                self._do(self._machine.grace_over(round_))
            elif kind == Kind.LIVES:
                self._signals.send(source, KINDS * (WAITS if "waits" in self._busy else 0) + Kind.LIVE)
            elif kind == Kind.CLOSES:
                self._closing |= {source}
            elif kind != Kind.LIVE:
                self._do(self._machine.heard(source, Kind(kind), round_))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Signal):
                self._signals.send(action.peer, KINDS * action.round + action.kind)
            elif isinstance(action, Join):
                self._join(action)
            elif isinstance(action, Recover):
                self._tell_lost(action)
                self._recover()
            elif isinstance(action, LeftOut):
                self._left_out = f"{self.name} was left out: others have lost the connection to it"
            elif self._graced != action.round:
                self._graced = action.round
                self._signals.remind(self._seconds_of_grace(), KINDS * action.round + Kind.GRACE_OVER)

    def _tell_lost(self, action: Recover) -> None:
        """Logs what the loss of a rank costs: nothing once all have finished. An `Elastic` tells so itself."""
        if not (self.comm.hasty or self._machine.over):
            logger.warning(
                "partial round %d: %d ranks go on without rank %d; lost is what it gave that is in no round yet, such "
                "as the gradients of its last steps%s",
                self._machine.round,
                len(action.members),
                action.lost,
                "" if self._bits is None else ", and its residual",
            )

    def _seconds_of_grace(self) -> float:
        share, seconds = self._grace
        apart = [later - earlier for earlier, later in pairwise(self._began)]
        return share * statistics.median(apart) if share and apart else seconds

    def _join(self, join: Join) -> None:
        self._began.append(self.comm.clock())
        late, late_round = self._arrivals.began(join.round, self._began[-1], fresh=join.fresh)
        fragment = self._fragment
        taken = self._brought = self._deposits[fragment]
        self._deposits[fragment] = Deposits(taken.like)
        brings = (taken.weight, taken.count, taken.finite)
        changes = self.changes
        settings = 0 if changes is None else zlib.crc32(changes.encode(), 1)
        header = Header(join.stage, join.contributes, join.fresh, *brings, late, late_round, self.calls, settings)
        said = f"{self.name} has changed {changes or 'nothing'}"
        rounding = None
        if self._bits is not None:
            rounding = Rounding(self._bits, self._residuals[fragment], self._weighted)
        own = taken.tensors or _zeros(taken.like)
        self._begin(partial(partial_round, header, own, rounding, said), f"round {join.round}")

    def _abandon(self) -> None:
        """Cancels the collective under way, whose end is of no use to this rank any more."""
        if isinstance(self._collective, Attempt):
            self._collective.cancel()

    def _recover(self) -> None:
        self._abandon()
        last, ranks, like = self._last, self.comm.size, self._deposits[self._fragment].like
        self._begin(partial(recovery, self._machine.round, last, ranks, like), "what is over")

    def _begin(self, make: Callable[[int, int], Schedule[Any]], what: str) -> None:
        """Begins a collective among the ranks that are left; make: gives the schedule of a position among so many."""
        members = sorted(self._machine.members)
        self._number += 1
        self._count("round", True)
        told = self._kept(make(members.index(self.comm.rank), len(members)), self._number)
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
            self._signals.send(self.comm.rank, KINDS * number + Kind.OVER)

    def _collective_over(self) -> None:
        collective = self._collective
        self._count("round", False)
        if isinstance(collective, Attempt) and collective.lost is not None:
            self._do(self._machine.gone(collective.lost))
        elif collective is not None and collective.error is not None:
            raise CollectiveError(str(collective.error)) from collective.error
        elif not self._machine.recovering:
            headers, totals, residual = self._value
            self._end_round(self._of_all(headers, totals), self._machine.completed, residual)
        elif self._value is not None:
            residual = _zeros(self._residuals[self._fragment]) if self._value[1] else None  # what it was nobody knows
            self._end_round(self._value, self._machine.recovered, residual)
        else:
            if self._machine.joined and self._brought is not None:
                self._deposits[self._fragment].put_back(self._brought)
            self._brought = None
            self._do(self._machine.recovered(None))

    def _of_all(self, headers: Sequence[Header], totals: list[Tensor]) -> Ended:
        """Headers of all ranks, also of those that are gone, and the totals."""
        of = dict(zip(sorted(self._machine.members), headers, strict=True))
        return [of.get(rank, Header(Stage.GONE)) for rank in range(self.comm.size)], totals

    def _end_round(self, ended: Ended, tell: Callable[..., list[Action]], residual: list[Tensor] | None) -> None:
        headers, totals = ended
        if residual is not None:
            self._residuals[self._fragment] = residual
        round_, self._brought = self._machine.round, None
        if self._shrinks:
            self._last = headers, [total.clone() for total in totals]  # the user may change what he gets
        meetings = self._machine.meetings
        actions = tell(headers, behind=len(self._results) + 1 > self._leaving)
        met = self._machine.meetings > meetings
        self.called = not met and (self.called or any(header.calls for header in headers))
        if met:  # who has finished changes nothing any more
            self.changes = "" if self.changes is not None and self._machine.stage is Stage.FINISHED else None
        if met and not self._machine.over:
            self._at_meeting = self._between()
        self.lateness.record(headers)
        if totals:
            self._results.append(self._result(round_, headers, totals))
        self._do(actions)

    def _result(self, round_: int, headers: Sequence[Header], totals: list[Tensor]) -> PartialResult:
        def who(says: Callable[[Header], bool]) -> tuple[int, ...]:
            return tuple(rank for rank, header in enumerate(headers) if says(header))

        return PartialResult(
            total=totals,
            round=round_,
            fragment=round_ % self._machine.rules.fragments,
            contributors=who(lambda header: header.contributes),
            fresh=who(lambda header: header.fresh),
            staleness=tuple(self._machine.missed),
            deposits=sum(header.deposits for header in headers),
            weight=sum(header.weight for header in headers),
            nonfinite=who(lambda header: not header.finite),
            members=who(lambda header: header.stage is not Stage.GONE),
        )

    @property
    def _fragment(self) -> int:
        """Fragment of the current round."""
        return self._machine.round % self._machine.rules.fragments

    def _gone(self) -> frozenset[int]:
        """Ranks that have departed, or are gone as others tell."""
        return self._signals.departed | self._others - self._machine.members

    def _needs(self) -> Collection[int]:
        """Ranks that this one waits for by itself, as it would not hear of them from others."""
        if self._machine.over:
            return self._others - self._closing
        if self._collective is not None and (self._machine.joined or self._machine.recovering):
            return self._collective.peers
        return {self._machine.coordinator}

    def _looks(self, over: Callable[[], bool]) -> bool:
        """Whether the condition holds, or waiting is in vain. A rank that has departed and has not closed is gone.

        Without `shrinks` such a rank is waited for in the round's collective, which fails alike on all ranks.
        """
        with self._lock:
            gone = self._signals.departed - self._closing
            if self._shrinks:
                for rank in sorted(gone):
                    self._do(self._machine.gone(rank))
            elif gone and not self._machine.over and not self._machine.joined:
                self._do(self._machine.heard(self.comm.rank, Kind.BEGIN, self._machine.round))
            return bool(self._left_out) or over()

    def _check(self) -> None:
        self._signals.check()
        if self._left_out:
            raise (LeftOutError if self.comm.hasty else CollectiveError)(self._left_out)

    def _waits(self) -> str:
        machine = self._machine
        whom = "all others to end it"
        if not machine.joined:
            whom = f"rank {machine.coordinator} to begin it, which must synchronize() before it waits elsewhere"
        return f"rank {machine.rank} waits in partial round {machine.round} for {whom}"


def _copies(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[one.clone() for one in each] for each in lists]


def _zeros(like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(one) for one in like]
