"""Outer steps by rounds that do not wait for the last rank, with any engine of numbered sums as an argument."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from communicators import CollectiveError, Communicator, Elastic
from replicas import ElasticRounds, check_like
from torch import Tensor

from local_sgd.driver import Driver, shared_state
from local_sgd.fragments import Fragments
from local_sgd.outer import OuterStep
from local_sgd.parts import by_name
from local_sgd.settings import Settings

MakeRounds: TypeAlias = Callable[[Any, Communicator], Any]
"""allreduce(like, comm): makes the rounds, on all ranks, such as a `PartialAllreduce`; with weighted=True where totals
are divided by their weights.

like: a list of tensors for each fragment, of which there is one but in `StreamingDiLoCo`. Rounds sum what ranks
contribute, fragments taking turns; every rank gets every round once, in order, bit for bit, and nothing is lost:

- give(function, leaving=n) contributes weight · tensors, where function(fragment) returns (tensors, weight) of the
  fragment whose turn is next, first, and of those whose turn was missed; of n earlier ones a round is still to be
  taken. take(leaving=n) returns the rounds that are over, at least one but not the last n of several; none where
  nothing is under way;
- synchronize(last) meets all ranks that have more to contribute; returns the rounds until then. last: fragment →
  (tensors, weight) that are contributed before;
- finish(last) ends this rank's contributions; returns the remaining rounds; close() closes, together with all others;
- __exit__(kind, error, trace) tells the others of an error;
- over an `Elastic` moreover all that `replicas.ElasticRounds` uses: a rank that sets `calls` asks all to meet, which
  `called` says after the round; `members`, `given_up` and `complete` say who is gone, `round` which one is next;
- state_dict() gives contributions in no round yet, rounds that were not returned, and the position in the rounds;
  load_state_dict(state), which all ranks call, restores it. Its ["machine"]["round"] is the number of the current
  round, from which begin_at(number), which all ranks call, goes on, too; "residuals" is what rounding has left out on
  this rank, and so is the attribute of that name, which may be set.

A round, alike on all ranks, such as `PartialResult`, has `total`, the sum of the contributions, weights included;
`weight`, the sum of the weights; `deposits`, the number of contributions, without any `last`; `round`, its number;
`fragment`; `members`, the ranks that took part; `nonfinite`, those of them that contributed NaN or inf.
"""

OWN_STATS = ("steps", "bytes_sent")
"""Statistics that an optimizer counts itself, not its rounds."""


class OuterRounds(Driver):
    """Contributes the change of a block, Δ = z − x, to a round; every round is one step of the outer optimizer.

        give Δ;   for every round that is over:  z ← outer(z, total / m);   then  x ← z

    A late Δ goes into a later round, as one more summand. m is the number of ranks that took part; weighted: total is
    divided by its weight. z is the same on all ranks after the same number of rounds. Of a round that has only what
    ranks give as they meet, of blocks that none has completed, the mean is z.

    By fragments, one of F is given every τ/F steps, that whose turn is next, so that a late rank gives what others give
    then, and those whose turn it has missed. A round is applied `delay` steps later, or before F others are given. x is
    then what the rule makes of it where this rank has given this fragment at that time. Else steps that are in no round
    stay: x is what the rule makes of x as it was given, plus what has changed since; x + z′ − z where nothing was
    given. Nothing is given twice: Δ is z − x, or the change since x was given.

    Over an `Elastic` rounds go on without ranks that die. Where others wait, or rounds have lost a rank, all meet: each
    gives the steps of its block so far, after the step under way, and all begin another block.

    bases: x of the fragments that were given, and are not applied yet, as it was given, by turn.
    dues: of each time that something was given, turn and number of steps until a round is applied.
    """

    rule: OuterStep
    meets = True

    def __init__(
        self,
        make: MakeRounds | Any,
        settings: Settings,
        *,
        levels: bool = False,
        fragments: Fragments = 1,
        delay: int | None = None,
    ) -> None:
        super().__init__(None, fragments, delay)
        if not callable(make):
            raise TypeError(
                f"allreduce is {make!r}, expected what makes rounds, allreduce(like, comm), such as "
                "functools.partial(PartialAllreduce, quorum='majority'); or, with compress, the sum of what it sends"
            )
        policies = {"buffers": settings.get("buffers", "keep"), "inner_state": settings.get("inner_state", "keep")}
        waits = [f"{name}={policy!r}" for name, policy in policies.items() if policy != "keep"]
        waits += ["native=True"] * bool(settings.get("native")) + ["shares"] * (settings.get("shares") is not None)
        waits += ["two levels"] * levels
        if waits:
            raise ValueError(
                f"{', '.join(waits)}: all ranks wait for each other there, which rounds do not: leave it out"
            )
        self._make, self._ended = make, False
        self._elastic: ElasticRounds | None = None
        self._bases: dict[int, list[Tensor]] = {}
        self._dues: list[list[int]] = []
        self._used = False  # whether something was given to these rounds
        self._first: int | None = None  # fragment that was asked for first

    def connect(self) -> None:
        """Begins the outer optimizers, and makes the rounds, which are all that is exchanged."""
        super().connect()
        self.needs += ["rounds", "cut", *(["bases", "given", "dues"] if self.by_fragment else [])]
        if isinstance(self.comm, Elastic):
            own = weakref.proxy(self)
            rounds = {name: value for name, value in getattr(self._make, "keywords", {}).items() if _plain(value)}
            settings = f"{self.owner._alike}, {self._cut}, {self._weighted}, {sorted(rounds.items())}"
            self._elastic = ElasticRounds(
                self.owner, self.comm, lambda comm: own._made(comm), lambda: own._compare_anchors(), settings=settings
            )

    def enter(self) -> None:
        """Makes the rounds, which are all that is exchanged, with all other ranks."""
        try:
            if self._elastic is None:
                self._fixed = self._made(self.comm)
            self.regrouped()
        except (AttributeError, TypeError) as error:
            error.add_note(
                "allreduce=, without compress=, makes rounds; a sum of what a compressor sends goes with a compressor"
            )
            raise
        self._used = False

    @property
    def _rounds(self) -> Any:
        return self._fixed if self._elastic is None else self._elastic.current

    def _made(self, comm: Communicator) -> Any:
        like = [[part["anchor"] for part in fragment.parts] for fragment in self.fragments]
        return self._make(like, comm, **({"weighted": True} if self._weighted else {}))

    def regrouped(self) -> None:
        """Has the others, and newcomers, meet in new rounds."""
        if self._elastic is not None:
            self._elastic.agree()

    def part(self) -> None:
        """Leaves the rounds."""
        if self._elastic is not None:
            self._elastic.leave()

    def resting(self) -> dict[str, Tensor]:
        """Anchors besides, which ranks compare only where all have applied the same rounds."""
        return {**super().resting(), **shared_state(self.parts, self.rule)}

    def count(self, weight: float) -> None:
        """Counts a step; applies the rounds that are due, and gives what comes next."""
        if self._ended:
            raise RuntimeError(f"a step after finish(), which is for good with rounds: make another {self.what}")
        self._refuse_changed()
        self.block.count(weight)
        for fragment in self.fragments:
            fragment.done, fragment.weight = fragment.done + 1, fragment.weight + weight
        self._dues = [[turn, steps - 1] for turn, steps in self._dues]
        self._take_due()
        while self._launched < self._launches_by_now():
            if len(self._dues) == len(self.fragments):
                self._take_rounds()
            self.next_boundary()
            self._first, self._used = None, True
            if self._elastic is not None:
                self._elastic.call()
            self._rounds.give(self._give, leaving=len(self._dues))
            assert self._first is not None
            self._dues.append([self._first, self.delay or 0])
            self._launched += 1
            self._take_due()
        if self._launched == len(self.fragments):
            self._end_block()
        if self._elastic is not None and self._elastic.called:
            self._end(most=1, drains=False)

    def end(self, *, most: int | None) -> None:
        """Takes part until no rank has another block (finish, final), or meets all that have more (drain)."""
        self._end(most=most, drains=most is not None)

    def _end(self, *, most: int | None, drains: bool) -> None:
        self._refuse_changed()
        self.next_boundary()
        last = {turn: self._given(turn) for turn, held in enumerate(self.fragments) if self.own_weight(held)}
        self._used = True
        if self._elastic is not None and not self._ended:
            self._meet(self._elastic, last, finished=most is None, drains=drains)
            last = {}
        elif most is not None:
            self._apply(self._rounds.synchronize(last))
            self._compare_anchors()
        if most is None and not self._ended:
            self._apply(self._rounds.finish(last))
            self._compare_anchors()
            self._rounds.close()
            self._ended = True
        self._rest()

    def _meet(self, elastic: ElasticRounds, last: Mapping[int, Any], *, finished: bool, drains: bool) -> None:
        """Meets all others; a rank that has finished does so until they have, too, one that drains until they do."""
        over = False
        while not over:
            self._apply(self._rounds.synchronize(last))
            self._rest()  # a newcomer may get it
            over, last = elastic.met(finished=finished, drains=drains), {}
            if not over:
                self.owner.admit()

    def _rest(self) -> None:
        """Takes z, with nothing under way."""
        self._bases, self._dues = {}, []
        self.put(self.parts, [part["anchor"] for part in self.parts])
        if self.at_rest is not None:
            self.at_rest.forget()
        self._end_block()
        self.drained = True
        self.owner.end_steps()

    def depart(self) -> None:
        """Leaves the drained state before a step; parameters loaded since then are refused."""
        if self.drained and any(not torch.equal(part["anchor"], part.gather()) for part in self.parts):
            raise RuntimeError(
                "the model has other weights than those that its ranks ended with, which the rounds of allreduce= "
                f"do not compare: load weights on all ranks before the {self.what} is made"
            )
        self.drained = False

    def models(self, comm: Communicator) -> list[Tensor]:
        """Anchors, once all ranks have applied the same rounds."""
        if not self.drained:
            raise RuntimeError("averaged_model(): ranks may have applied unlike numbers of rounds: drain() first")
        return self.anchors()

    def give_up(self, error: BaseException) -> None:
        """Tells the other ranks of an error."""
        self._rounds.__exit__(type(error), error, error.__traceback__)

    def stats(self) -> dict[str, float]:
        """Seconds, lateness and norm of residuals, as far as the engine of the rounds counts them."""
        counts = getattr(self._elastic or self._rounds, "stats", dict)
        counted = {name: number for name, number in counts().items() if name not in OWN_STATS}
        return {**super().stats(), **counted}

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """State of the rounds besides; not for newcomers, who come where nothing is under way."""
        if self._elastic is not None and not waits:
            return super().state_dict()
        own = {"rounds": self._rounds.state_dict(), "cut": self._cut, **super().state_dict()}
        if self.by_fragment:
            bases = [base for turn in range(len(self.fragments)) for base in self._base(turn)]
            own |= {"bases": by_name(self.parts, bases), "given": sorted(self._bases), "dues": self._dues}
        return own

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError also for what rounds hold of another cut."""
        super().check(state)
        check_like(state["rounds"], {"machine": {"round": 0}}, "rounds")
        if self._elastic is not None and not state["drained"]:
            raise ValueError("the state was taken between two meetings, of ranks that may be others now: drain() first")
        theirs, own = any(state["rounds"].get("residuals", ())), any(self._rounds.residuals)
        if theirs != own and not state["drained"]:
            raise ValueError(
                f"the state is of rounds with{'' if theirs else 'out'} residuals, and allreduce= is not: drain()"
            )
        if state["cut"] != self._cut and (not state["drained"] or self._own_residuals(state)):
            raise ValueError(
                f"what is under way is by vector, cut otherwise: the state is of {state['cut']} elements, this is of "
                f"{self._cut}; make the {self.what} with the same bucket_bytes and fragments"
            )

    def _load(self, state: Mapping[str, Any]) -> None:
        """Restores the rounds besides; of a drained state, in which nothing is under way, number and own residuals."""
        super()._load(state)
        self._ended = False
        if self._elastic is not None:
            return
        if self._used:
            self._rounds.close()
            self.enter()
        rounds = state["rounds"]
        if not state["drained"]:
            self._rounds.load_state_dict(rounds)
        else:
            if residuals := self._own_residuals(state):
                self._rounds.residuals = residuals
            self._rounds.begin_at(rounds["machine"]["round"])
        given = {turn: self.fragments[turn].parts for turn in state.get("given", ())}
        self._bases = {turn: [part.flat_of(state["bases"]) for part in parts] for turn, parts in given.items()}
        self._dues = [list(due) for due in state.get("dues", ())]

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Goes on from a drained state, which all ranks load, or as a newcomer from one and the rounds since."""
        if self._elastic is None:
            return
        if "rounds" not in state:
            self._apply(self._rounds.take())
            return
        self._elastic.begin_anew(state["rounds"]["machine"]["round"], self._own_residuals(state) or None)
        self.enter()

    def _refuse_changed(self) -> None:
        """Raises CollectiveError here, and tells the others of it, where something has changed at rest."""
        if self.at_rest is not None and (error := self.at_rest.error(self.comm.rank)) is not None:
            self.give_up(error)
            raise error

    def _compare_anchors(self) -> None:
        """Compares them where all have applied the same rounds, unless some have died: the others would wait for them.

        Raises CollectiveError on every rank.
        """
        if self.at_rest is not None and (self._elastic is not None or getattr(self._rounds, "complete", True)):
            self.compare(shared_state(self.parts, self.rule), "at the end")

    @property
    def _cut(self) -> list[list[int]]:
        """Elements of the vectors of each fragment."""
        return [[part.bucket.numel for part in fragment.parts] for fragment in self.fragments]

    def _own_residuals(self, state: Mapping[str, Any]) -> list[Any]:
        """Residuals that this rank saved, where these rounds have some, too."""
        theirs = state["rounds"].get("residuals", [])
        return theirs if self._is_own(state) and any(theirs) and any(self._rounds.residuals) else []

    def _base(self, turn: int) -> list[Tensor]:
        """Vectors from which a fragment's change is reckoned."""
        return self._bases.get(turn) or [part["anchor"] for part in self.fragments[turn].parts]

    def _given(self, turn: int) -> tuple[list[Tensor], float]:
        """Change of a fragment, and its weight; from now on it counts as given."""
        fragment = self.fragments[turn]
        weight, xs = self.own_weight(fragment), [part.gather() for part in fragment.parts]
        changes = [base - x for base, x in zip(self._base(turn), xs, strict=True)]
        self._bases[turn] = xs
        fragment.done, fragment.weight = 0, 0.0
        return changes, weight

    def _give(self, turn: int) -> tuple[list[Tensor], float]:
        """Change of a fragment; of the first that is asked for a round is due `delay` steps later."""
        if self._first is None:
            self._first = turn
        return self._given(turn)

    def _take_due(self) -> None:
        while self._dues and self._dues[0][1] <= 0:
            self._take_rounds()

    def _take_rounds(self) -> None:
        """Applies the rounds that are over, at least one, and leaves one for each that is due later."""
        turn, _ = self._dues.pop(0)
        self._apply(self._rounds.take(leaving=len(self._dues)), due=turn)

    def _apply(self, rounds: Iterable[Any], due: int | None = None) -> None:
        for one in rounds:
            if one.nonfinite:
                raise CollectiveError(
                    f"{self.what}: NaN or inf in the parameters of ranks {list(one.nonfinite)}, seen in round "
                    f"{one.round}: lower the learning rate there, clip gradients, or go back to a checkpoint"
                )
            fragment = self.fragments[one.fragment]
            parts, rule, base = fragment.parts, fragment.rule, self._bases.pop(one.fragment, None)
            assert isinstance(rule, OuterStep)
            xs = [part.gather() for part in parts]
            since = [torch.zeros_like(x) for x in xs]
            if base is None:  # x stays as far from z
                since = [x - part["anchor"] for x, part in zip(xs, parts, strict=True)]
            elif one.fragment != due:
                since, xs = [x - given for x, given in zip(xs, base, strict=True)], base
            if one.weight or not self._weighted:  # else, on all ranks, there is nothing to take a mean of
                divisor = one.weight if self._weighted else len(one.members)
                deltas = [(t / divisor).to(part["anchor"].device) for part, t in zip(parts, one.total, strict=True)]
                if one.deposits or not rule.gain():
                    rule.step(parts, deltas)
                else:  # of blocks that no rank has completed, see `_moved` of the driver
                    for part, delta in zip(parts, deltas, strict=True):
                        part["anchor"].sub_(delta)
            zs = [part["anchor"] for part in parts]
            if base is not None:
                zs = [rule.taken(x, z) for x, z in zip(xs, zs, strict=True)]
            self.put(parts, [z + moved for z, moved in zip(zs, since, strict=True)])


def _plain(value: Any) -> bool:
    """Whether the text of a setting is the same on all ranks."""
    return value is None or isinstance(value, bool | int | float | str)
