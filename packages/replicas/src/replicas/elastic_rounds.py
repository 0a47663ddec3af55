"""Rounds that wait for no rank, over an `Elastic`: where all ranks meet, some come and go, and new rounds begin."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from communicators import CollectiveError, Communicator, Elastic, run, schedules

from replicas.wrapping import Wrapping

PARTED, KNOWS, ALIKE = 2, 3, 5  # places in what ranks tell each other when they meet
SECONDS = ("seconds_exchanging", "seconds_waited", "seconds_hidden")


class ElasticRounds:
    """Rounds of one generation after another, as a `PartialAllreduce` runs them over its fixed group.

    Args:
        owner: Optimizer that steps with them, which lets ranks in; a weak proxy of it, as it holds these rounds.
        elastic: Its ranks.
        make: make(group): makes the rounds over the ranks of a generation.
        compare: compare() raises CollectiveError on every rank where they hold unlike replicas; called where all have
            met, and no newcomer is without a state.
        settings: Text of the model and of settings that all ranks share; a newcomer with another one is refused.

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
        *,
        settings: str,
    ) -> None:
        self._owner, self._elastic, self._make, self._compare = owner, elastic, make, compare
        self._settings = settings
        self.current: Any = None
        self.number = 0
        self._generation = 0
        self._named: tuple[str, ...] = ()  # members of the rounds' group
        self._residuals: list[list[torch.Tensor]] | None = None  # of rounds that have ended with their group
        self._left: Any = None  # the last of them
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
        if self.current is self._left:
            return now | self._earlier
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

    def met(self, *, finished: bool = False, drains: bool = False) -> bool:
        """Lets ranks come and go, once this one has met the others in the rounds.

        Args:
            finished: See `agree`.
            drains: See `agree`.

        Returns:
            See `agree`.
        """
        self.number = self.current.round
        over = self.agree(finished=finished, drains=drains)
        self.current.calls = False  # who is still awaited is asked for anew
        return over

    def agree(self, *, finished: bool = False, drains: bool = False) -> bool:
        """Goes on with the ranks of the current generation, a newcomer for the first time.

        Rounds go on in a new group where ranks have changed. All open them by a second meeting, which outlives deaths
        as rounds do, so that nobody trains on while another waits for him in vain.

        Args:
            finished: Whether this rank has no more steps.
            drains: Whether it is to meet all that have more steps, and not only those that were called.

        Returns:
            Whether that is so: with `finished` all have finished, with `drains` all drain or have finished.

        Raises:
            CollectiveError: Ranks are at unlike rounds, as of states that were loaded.
            LeftOutError: The others have met without this rank.
            ValueError: This is a newcomer whose model or settings are others.
        """
        together = partial(self._together, finished, drains)
        while True:
            running, unfinished = self._elastic.atomic(together, self.leave, self._opened)
            if unfinished:
                self._owner.let_in(at_once=finished)
            if self._generation == self._elastic.generation:
                return not (unfinished if finished else running if drains else 0)

    def _together(self, finished: bool, drains: bool) -> tuple[int, int]:
        """Opens the rounds of the current ranks; the number of those that train on, and of those with more steps."""
        elastic = self._elastic
        gone = {self._named[rank] for rank in self.current.given_up} if self._named else set[str]()
        told = [not (finished or drains), not finished, not gone.isdisjoint(elastic.members), not elastic.newcomer]
        own = torch.tensor([*told, self.number, zlib.crc32(self._settings.encode())], device="cpu").long()
        facts = f"{self._owner.what}: who meets"
        gathered = run(schedules.allgather(own, elastic.rank, elastic.size), elastic, facts=facts)
        said: list[list[int]] = [each.tolist() for each in gathered]
        if any(each[PARTED] for each in said):
            elastic.part(gone)
        number = self._number_of([each[ALIKE - 1 :] for each in said if each[KNOWS]])
        self._refuse_others(said)
        if self._generation != elastic.generation:  # and nobody needs the last rounds any more
            self.leave()
            self.current = self._make(elastic.group)
            if self._residuals is not None:
                self.current.residuals = self._residuals
            self.current.begin_at(number)
            self.number, self._generation, self._named = number, elastic.generation, elastic.members
            self.current.name = elastic.members[elastic.rank]
        if all(each[KNOWS] for each in said):
            self._compare()
        return sum(each[0] for each in said), sum(each[1] for each in said)

    def _number_of(self, known: list[list[int]]) -> int:
        """Number of the next round. known: number and hash of settings, of those who have a state."""
        numbers = sorted({number for number, _ in known})
        if len(numbers) > 1:
            raise CollectiveError(
                f"ranks of {self._owner.what} are to go on from rounds {numbers}: load states that were all taken at "
                "one meeting"
            )
        return numbers[0]

    def _refuse_others(self, said: list[list[int]]) -> None:
        """Has newcomers with other settings go, and the others go on without them."""
        settings = next(each[ALIKE] for each in said if each[KNOWS])
        others = [not each[KNOWS] and each[ALIKE] != settings for each in said]
        if others[self._elastic.rank]:
            self._elastic.close()
            raise ValueError(
                f"this rank has come to a training with another model or other settings; its own are {self._settings}: "
                "start it as those who train were started"
            )
        if any(others):
            run(schedules.barrier(self._elastic.rank, self._elastic.size), self._elastic, facts="others go")

    def _opened(self) -> bool:
        """Whether all current ranks have met in the rounds."""
        for _ in self.current.synchronize():
            pass
        return bool(self.current.complete)

    def leave(self) -> None:
        """Leaves the current rounds without waiting for anybody."""
        if self.current is not None and self.current is not self._left:
            self._left, self._earlier = self.current, {name: self.stats()[name] for name in SECONDS}
            self.current.__exit__(CollectiveError, CollectiveError("its ranks meet anew"), None)
            self._residuals = self.current.residuals
