"""Rounds that wait for no rank, over an `Elastic`: where all ranks meet, some come and go, and new rounds begin."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Elastic, run, schedules

from replicas.wrapping import Wrapping

SECONDS = ("seconds_exchanging", "seconds_waited", "seconds_hidden")


class ElasticRounds:
    """Rounds of one generation after another, as a `PartialAllreduce` runs them over its fixed group.

    Args:
        owner: Optimizer that steps with them, which lets ranks in; a weak proxy of it, as it holds these rounds.
        elastic: Its ranks.
        make: make(group): makes the rounds over the ranks of a generation.
        compare: compare() raises CollectiveError on every rank where they hold unlike replicas; called where all have
            met, and no newcomer is without a state.

    Attributes:
        current: Rounds of the current generation; they are there after the first `agree`.
        number: Number of the next round when ranks last met, at which new rounds begin; a newcomer gets it by `agree`.
    """

    def __init__(
        self,
        owner: Wrapping,
        elastic: Elastic,
        make: Callable[[Communicator], Any],
        compare: Callable[[], object] = lambda: None,
    ) -> None:
        self._owner, self._elastic, self._make, self._compare = owner, elastic, make, compare
        self.current: Any = None
        self.number = 0
        self._generation = 0
        self._named: tuple[str, ...] = ()  # members of the rounds' group
        self._residuals: list[list[torch.Tensor]] | None = None  # of rounds that have ended with their group
        self._earlier = dict.fromkeys(SECONDS, 0.0)  # of them

    @property
    def called(self) -> bool:
        """Whether all ranks are to meet: one has asked for it in a round, or the rounds have lost one."""
        return bool(self.current.called) or len(self.current.members) < self._elastic.size

    def call(self) -> None:
        """Asks all ranks to meet, with what this rank gives next, where others wait to be let in or it is to leave."""
        self.current.calls = self._elastic.changing

    def stats(self) -> dict[str, float]:
        """Statistics of the current rounds, with the seconds of those before them."""
        now: dict[str, float] = dict(self.current.stats())
        return now | {name: now[name] + seconds for name, seconds in self._earlier.items()}

    def begin_anew(self, number: int, residuals: list[list[torch.Tensor]] | None = None) -> None:
        """Begins with the round of this number; every rank calls it, after which all `agree`.

        Args:
            number: Number of the first round.
            residuals: What rounding has left out on this rank; None: what it has.
        """
        self.number, self._generation = number, 0
        if residuals is not None:
            self.current.residuals = residuals  # of which the next rounds have a copy

    def met(self, *, finished: bool) -> bool:
        """Lets ranks come and go, once this one has met the others in the rounds.

        Args:
            finished: See `agree`.

        Returns:
            See `agree`.
        """
        self.number = self.current.round
        return self.agree(finished=finished)

    def agree(self, *, finished: bool = False) -> bool:
        """Goes on with the ranks of the current generation, a newcomer for the first time.

        Rounds go on in a new group where ranks have changed. All open them by a second meeting, which outlives deaths
        as rounds do, so that nobody trains on while another waits for him in vain.

        Args:
            finished: Whether this rank has no more steps.

        Returns:
            Whether all ranks have finished.

        Raises:
            LeftOutError: The others have met without this rank.
        """
        together = partial(self._together, finished)
        while True:
            unfinished = self._elastic.atomic(together, self.leave, self._opened)
            if unfinished:
                self._owner.let_in(at_once=finished)
            if self._generation == self._elastic.generation:
                return not unfinished

    def _together(self, finished: bool) -> int:
        """Number of ranks that have more steps, among the current ones, to whom rounds belong from now on."""
        gone = {self._named[rank] for rank in self.current.given_up} if self._named else set[str]()
        knows, parted = not self._elastic.newcomer, not gone.isdisjoint(self._elastic.members)
        facts = torch.tensor([not finished, parted, knows, self.number * knows]).long()
        counts = schedules.allreduce(facts, self._elastic.rank, self._elastic.size)
        told = run(counts, self._elastic, facts=f"{self._owner.what}: who has finished").tolist()
        unfinished, parted, knowing, numbers = told
        if parted:
            self._elastic.part(gone)
        number = numbers // max(knowing, 1)
        if self._generation != self._elastic.generation:  # and nobody needs the last rounds any more
            self.leave()
            self.current = self._make(self._elastic.group)
            if self._residuals is not None:
                self.current.residuals = self._residuals
            self.current.begin_at(number)
            self.number, self._generation = number, self._elastic.generation
            self._named = self._elastic.members
            self.current.name = self._elastic.members[self._elastic.rank]
        if knowing == self._elastic.size:
            self._compare()
        return int(unfinished)

    def _opened(self) -> bool:
        """Whether all current ranks have met in the rounds."""
        for _ in self.current.synchronize():
            pass
        return bool(self.current.complete)

    def leave(self) -> None:
        """Leaves the current rounds without waiting for anybody."""
        if self.current is not None:
            self._earlier = {name: self.stats()[name] for name in SECONDS}
            self.current.__exit__(CollectiveError, CollectiveError("its ranks meet anew"), None)
            self._residuals = self.current.residuals
