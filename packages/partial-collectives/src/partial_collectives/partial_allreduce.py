"""`PartialAllreduce`: sums over ranks that do not wait for the last one, and lose nothing of it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, Self, TypeAlias, TypedDict

import torch
from communicators import CollectiveError, Communicator, Stats, as_communicator, run, schedules
from replicas import wholly
from torch import Tensor

from partial_collectives.collective import BITS
from partial_collectives.deposits import Copies, weighted_copy
from partial_collectives.protocol.events import Stage
from partial_collectives.protocol.rules import MAX_STALENESS, Quorum, check_rules
from partial_collectives.result import PartialResult
from partial_collectives.rounds import PartialRounds
from partial_collectives.stragglers import Lateness

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Weighted: TypeAlias = tuple[Tensors, float]
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""With `FLOATING`, dtypes that add."""


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
        self._one = isinstance(like, Tensor)
        self._like = _fragments(like)
        for each in self._like:
            _check_like(each, compress)
        if not isinstance(weighted, bool):
            raise TypeError(f"weighted is {weighted!r}, expected True or False")
        self.comm = as_communicator(comm)
        if self.comm.hasty and isinstance(quorum, int):
            quorum = min(quorum, self.comm.size)  # of a group that others may have left
        waits = _parsed_grace(grace)
        size, fragments = self.comm.size, len(self._like)
        rules = check_rules(quorum, max_staleness, any(waits), seed, size, fragments=fragments)
        shapes = " | ".join(", ".join(f"{tuple(one.shape)} {one.dtype}" for one in each) for each in self._like)
        shrinks = _shrinks(on_death, self.comm)
        settings = f"quorum={quorum!r}, {max_staleness=}, {grace=}, {seed=}, {shrinks=}, {weighted=}"
        facts = f"PartialAllreduce({shapes}; {settings}{f', {compress=}' if compress else ''})"
        run(schedules.barrier(self.comm.rank, size), self.comm, facts=facts)
        flat = [[torch.empty(one.numel(), dtype=one.dtype) for one in each] for each in self._like]
        rounds = f"a round (a rank with no more steps calls finish()) of {facts}"
        bits = None if compress is None else BITS[compress]
        self._rounds = PartialRounds(
            self.comm, rules, flat, waits, rounds, shrinks=shrinks, bits=bits, weighted=weighted
        )
        self._closed, self._sent_before = False, self.comm.bytes_sent

    @property
    def round(self) -> int:
        """Number of the current round, and so of the rounds that are over on this rank."""
        return self._rounds.machine.round

    @property
    def name(self) -> str:
        """Name of this rank in errors, its number by default; may be set."""
        return self._rounds.name

    @name.setter
    def name(self, name: str) -> None:
        self._rounds.name = name

    @property
    def given_up(self) -> frozenset[int]:
        """Ranks that have not answered, without which this one has gone on; they may have gone on without it."""
        return frozenset(self._rounds.given_up)

    @property
    def members(self) -> frozenset[int]:
        """Ranks that this one does not know to be gone."""
        return self._rounds.machine.members

    @property
    def calls(self) -> bool:
        """Whether this rank asks all to meet, in each round that it takes part in; may be set."""
        return self._rounds.calls

    @calls.setter
    def calls(self, calls: bool) -> None:
        self._rounds.calls = calls

    @property
    def called(self) -> bool:
        """Whether a rank has asked all to meet, in a round since they last have; the same on all after each round."""
        return self._rounds.called

    @property
    def changes(self) -> str | None:
        """Changes of settings on this rank since ranks last met, as text; None: it does not tell. May be set.

        All raise one CollectiveError, that has the texts of two ranks, in the first round in which ranks tell unlike
        ones. It is None again where they meet; after `finish()` it is "", as nothing changes any more.
        """
        return self._rounds.changes

    @changes.setter
    def changes(self, changes: str) -> None:
        self._rounds.changes = changes

    @property
    def complete(self) -> bool:
        """Whether nobody was gone when ranks last met; the same on all ranks that are left."""
        return self._rounds.machine.complete

    @property
    def residuals(self) -> list[list[Tensor]]:
        """Residuals of this rank by fragment, left out by rounding: 1-D, none without `compress`. May be set.

        They are a part of `state_dict`; set them before the first round, where others have ended in another object.
        """
        return self._rounds.residuals

    @residuals.setter
    def residuals(self, residuals: Sequence[Sequence[Tensor]]) -> None:
        _check_alike("residuals", residuals, self._rounds.residuals)
        self._rounds.residuals = [[one.clone() for one in each] for each in residuals]

    @property
    def lateness(self) -> Lateness:
        """Ranks that were last, and by how much, as the ranks have told in their rounds."""
        return self._rounds.lateness

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
            self._rounds.deposit(lambda fragment: self._copies(function(fragment), fragment), leaving)
        elif len(self._like) > 1:
            raise TypeError(f"allreduce() is given {type(tensor).__name__}, expected a function of the fragment")
        else:
            copies = self._copies((tensor, weight), 0)
            self._rounds.deposit(lambda _: copies, leaving)

    def take(self, *, leaving: int = 0) -> list[PartialResult]:
        """Returns the rounds that were completed since the last call, at least one; none where nothing is under way.

        Args:
            leaving: How many of the last rounds stay for a later call, if there are two or more.
        """
        if leaving < 0:
            raise ValueError(f"leaving is {leaving}, expected a number of rounds, 0 or more")
        self._rounds.wait_for_one()
        return self._taken(leaving=leaving)

    def synchronize(self, last: Mapping[int, Weighted] | None = None) -> Iterator[PartialResult]:
        """Meets all ranks that have more steps: yields rounds until one has found nobody running, and all is applied.

        Every such rank calls it, each after as many steps as it likes; then all have applied the same rounds, and go
        on. Call it for evaluation, and before a checkpoint.

        Args:
            last: Tensors and their weight, by fragment, that this rank gives before.

        Yields:
            Rounds in order, each to be applied once.
        """
        self._refuse_closed("synchronize()")
        yield from self._rest(Stage.PAUSED, last)

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
        self._rounds.close()
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
        exchanging, waited = self._rounds.seconds()
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
        return self._rounds.state()

    def load_state_dict(self, state: Mapping[str, Any], *, joins: bool = False) -> None:
        """Goes on where `state_dict` was taken; for every rank to call, before its first `allreduce()`.

        Args:
            state: Result of `state_dict`.
            joins: Whether the state is a peer's, for a rank that comes in place of one that has died. What the peer has
                given and is in no round yet stays the peer's to give; its rounds that were not returned yet are
                returned here too.

        Raises:
            TypeError: It is no state.
            ValueError: The state is of another `like` or `compress`, or was damaged; nothing has changed.
            CollectiveError: The states of the ranks are of different rounds.
        """
        self.refuse_begun("load_state_dict()")
        with wholly(self._rounds, "a PartialAllreduce", state):
            if not joins:
                _check_alike("residuals", state["residuals"], self._rounds.residuals)
            likes = [one.like for one in self._rounds.deposits]
            _check_alike("deposits", [one["acc"] for one in state["deposits"]], likes)
            for result in state["results"]:
                _check_alike("results", [result["total"]], [likes[result["fragment"]]])
            machine = {name: state["machine"][name] for name in ("round", "seed", "missed", "running", "unfinished")}
            facts = f"going on with partial rounds from {machine}"
            self._rounds.restore(state, joins=joins)  # before any rank goes on, and its signals come
        run(schedules.barrier(self.comm.rank, self.comm.size), self.comm, facts=facts)
        self._rounds.go_on()

    def begin_at(self, number: int) -> None:
        """Begins with the round of this number; for every rank to call, alike, before its first `allreduce()`."""
        self.refuse_begun("begin_at()")
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"a round's number is {number!r}, expected a whole one from 0 on")
        self._rounds.machine.begin_at(number)  # before any rank goes on, and its signals come
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

    def _give_up(self, error: BaseException) -> None:
        if not self._closed:
            self._closed = True
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            mine = f"rank {self.comm.rank} gave up its partial allreduce: {why}"
            self._rounds.give_up(str(error) if isinstance(error, CollectiveError) else mine)

    def _rest(self, stage: Stage, last: Mapping[int, Weighted] | None) -> Iterator[PartialResult]:
        rounds, machine = self._rounds, self._rounds.machine
        copies = {fragment: self._copies(given, fragment) for fragment, given in (last or {}).items()}
        if machine.over:
            if copies:
                raise RuntimeError(
                    "something is given after the last round: make a new PartialAllreduce, on every rank"
                )
            yield from self._taken()
            return
        meeting = machine.meetings + 1 if stage is Stage.PAUSED else None
        rounds.rest(stage, copies)

        def over() -> bool:
            return machine.over or (meeting is not None and machine.meetings >= meeting)

        while not over():
            yield from self._taken(meeting)
            rounds.wait(lambda: bool(rounds.results) or over())
        yield from self._taken(meeting)

    def _taken(self, meeting: int | None = None, leaving: int = 0) -> list[PartialResult]:
        rounds = self._rounds.take(meeting=meeting, leaving=leaving)
        return [replace(result, total=self._shaped(result)) for result in rounds]

    def _shaped(self, result: PartialResult) -> Tensor | list[Tensor]:
        of = zip(result.total, self._like[result.fragment], strict=True)
        shaped = [total.view(one.shape).to(one.device) for total, one in of]
        return shaped[0] if self._one else shaped

    def _copies(self, given: Weighted, fragment: int) -> tuple[Copies, float]:
        if fragment not in range(len(self._like)):
            raise ValueError(f"something is given for fragment {fragment}, expected one of 0 … {len(self._like) - 1}")
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(f"{type(given).__name__} is given for fragment {fragment}, expected (tensors, weight)")
        tensors, weight = _listed(given[0]), _checked_weight(given[1], self._like[fragment])
        if wrong := [_kind(one) for one in tensors if not _is_dense(one)]:
            raise TypeError(f"allreduce() is given {wrong}, expected a dense tensor, as in `like`; torch.from_numpy(x)")
        shapes = [(tuple(one.shape), one.dtype) for one in tensors]
        expected = [(tuple(one.shape), one.dtype) for one in self._like[fragment]]
        if shapes != expected:
            raise ValueError(f"allreduce() is given {shapes}, expected {expected}, as in `like`")
        return weighted_copy(tensors, weight), float(weight)

    def refuse_begun(self, what: str) -> None:
        """Refuses what may be done before the first round only.

        Args:
            what: Name of it.

        Raises:
            RuntimeError: There was a round.
        """
        if self._rounds.began:
            raise RuntimeError(f"{what} after the first round: call it on a new PartialAllreduce")

    def _refuse_closed(self, what: str, *, finishes: bool = False) -> None:
        if self._closed:
            raise RuntimeError(f"{what} after close(): make a new one, on every rank")
        if not finishes and self._rounds.machine.stage is Stage.FINISHED:
            raise RuntimeError(f"{what} after finish(): this rank has said that it has no more steps")


def _parsed_grace(grace: float | str) -> tuple[float, float]:
    """Grace as (share of the median, seconds); one of them is 0."""
    text = isinstance(grace, str) and grace.endswith("x")
    try:
        if isinstance(grace, bool):
            raise TypeError
        number = float(grace[:-1]) if text and isinstance(grace, str) else float(grace)
    except (TypeError, ValueError):
        raise ValueError(
            f"grace is {grace!r}, expected seconds, or a share of the rounds' median such as '0.5x'"
        ) from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"grace is {grace!r}, expected 0 or more")
    return (number, 0.0) if text else (0.0, number)


def _shrinks(on_death: str | None, comm: Communicator) -> bool:
    """Whether others go on after a death; ValueError where they cannot, or must."""
    if on_death is None:
        return comm.hasty
    if on_death not in ("error", "shrink"):
        raise ValueError(f"on_death is {on_death!r}, expected 'error' or 'shrink'")
    if on_death == "shrink" and not comm.outlives_ranks:
        raise ValueError(
            "on_death='shrink' needs ranks that outlive one another, over a gloo group or in a simulated world; "
            "under MPI the launcher ends the whole job when a rank dies, so leave on_death='error' there"
        )
    if on_death == "error" and comm.hasty:
        raise ValueError(
            "on_death='error' ends all ranks with the first that dies, but those of an Elastic go on: leave it out, or "
            "give a fixed group"
        )
    return on_death == "shrink"


def _listed(tensors: Any) -> list[Any]:
    """Tensors, or what is given in their place, as a list."""
    return list(tensors) if isinstance(tensors, Iterable) and not hasattr(tensors, "shape") else [tensors]


def _is_dense(one: Any) -> bool:
    return isinstance(one, Tensor) and one.layout == torch.strided and not one.is_meta


def _kind(one: Any) -> str:
    return f"{one.dtype} on {one.device}, {one.layout}" if isinstance(one, Tensor) else type(one).__name__


def _checked_weight(weight: Any, like: Sequence[Tensor]) -> float:
    """Weight as a number, a whole one where `like` holds integers."""
    given = weight.item() if math.prod(getattr(weight, "shape", (0,))) == 1 else weight
    if not isinstance(given, Real):
        raise TypeError(f"weight is {weight!r}, expected a number, such as that of samples")
    try:
        number = float(given)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"weight is {weight!r}, expected 0 or more, such as a number of samples")
    if not any(one.dtype in INTEGER for one in like):
        return number
    if not number.is_integer():
        raise ValueError(f"weight is {weight!r}, expected a whole number, as `like` holds integers")
    return int(number)


def _fragments(like: Tensors | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    of = _listed(like)
    return [list(each) for each in of] if of and all(isinstance(each, list | tuple) for each in of) else [of]


def _check_like(like: Sequence[Tensor], compress: str | None) -> None:
    if not (compress is None or compress in tuple(BITS)):
        raise ValueError(f"compress is {compress!r}, expected None or one of {tuple(BITS)}")
    if not like or not all(isinstance(one, Tensor) for one in like):
        kinds = [_kind(one) for one in like]
        raise TypeError(f"like is no tensor, nor a list of them: {kinds}; expected what to sum, torch.from_numpy(x)")
    if wrong := [_kind(one) for one in like if not _is_dense(one) or one.dtype not in (*FLOATING, *INTEGER)]:
        raise TypeError(f"like holds {wrong}, expected dense tensors of a dtype that adds: {[*FLOATING, *INTEGER]}")
    if compress and (others := [str(one.dtype) for one in like if one.dtype != torch.float32]):
        raise TypeError(f"like holds {others}, expected float32 alone, which compress={compress!r} rounds")


def _check_alike(what: str, given: Sequence[Sequence[Tensor]], own: Sequence[Sequence[Tensor]]) -> None:
    """Raises ValueError for tensors of a state, by fragment, that are of other sizes or dtypes than the own ones."""
    got, expected = ([[(tuple(one.shape), one.dtype) for one in each] for each in of] for of in (given, own))
    if got != expected:
        raise ValueError(f"{what} of {got} are given, expected {expected}: as like= and compress= are here")
