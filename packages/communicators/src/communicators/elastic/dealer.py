"""One rank's hand in the dealing: what it draws, from generation to generation."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from communicators.elastic.dealing import Change, Deal

logger = logging.getLogger("communicators.elastic")


class Dealer:
    """Deals batches to one rank.

    Attributes:
        drawn: Batches drawn in this generation.
        epochs: Epochs that this rank has drawn to their end.
        deal: Place at the beginning of this generation; None before the first batch.
        members: Names of the current ranks.
        rank: Place of this one among them.
    """

    def __init__(self) -> None:
        self.drawn = self.epochs = self.rank = 0
        self.deal: Deal | None = None
        self.members: tuple[str, ...] = ()
        self._held: list[tuple[Deal, Change]] = []  # generations since the last commit, and their ends
        self._missed: list[tuple[Change, tuple[str, ...], bool]] = []  # changes of the group before the first batch
        self._now: tuple[Deal, int] | None = None  # epoch of the next batch, and the batches drawn before it

    @property
    def facts(self) -> str:
        """Settings of the dealing that all ranks must share, as text."""
        deal = self.deal
        return "" if deal is None else f", {deal.numel} samples in batches of {deal.batch_size} by seed {deal.seed}"

    def count(self, rank: int, batches: int) -> str:
        """Number of a rank's batches in this generation, and of the samples in them."""
        samples = 0 if self.deal is None else sum(len(own) for _, own in self.deal.batches(rank, 0, batches))
        return f"{samples} samples in {batches} batches"

    def regroup(
        self, members: Sequence[str], rank: int, change: Change | None = None, *, commits: bool = False
    ) -> None:
        """Goes on in a new generation of these members.

        Args:
            members: Their names.
            rank: Place of this rank among them.
            change: End of the last generation, where this rank was in it.
            commits: Whether the last generation came to a commit.
        """
        self.members, self.rank, self.drawn, self._now = tuple(members), rank, 0, None
        if change is not None:
            self._missed.append((change, self.members, commits))
        if self.deal is not None:
            self._follow()

    def state(self) -> dict[str, Any]:
        """State for a newcomer."""
        deal = None if self.deal is None else asdict(self.deal)
        held = [(asdict(then), astuple(change)) for then, change in self._held]
        missed = [(astuple(change), members, commits) for change, members, commits in self._missed]
        return {"deal": deal, "held": held, "missed": missed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over another rank's state, of the same generation."""
        deal = None if state["deal"] is None else Deal(**state["deal"])
        held = [(Deal(**then), Change(*change)) for then, change in state["held"]]
        missed = [(Change(*change), members, commits) for change, members, commits in state["missed"]]
        self.deal, self._held, self._missed = deal, held, missed
        self.epochs = 0 if self.deal is None else self.deal.epoch

    def begin(self, numel: int, batch_size: int, seed: int) -> None:
        """Begins the dealing, or checks that it goes on as it began; see `Deal`."""
        if self.deal is None:
            founders = self._missed[0][0].members if self._missed else self.members
            self.deal = Deal(numel, batch_size, seed, len(founders))
            self._follow()
        theirs, own = (self.deal.numel, self.deal.batch_size, self.deal.seed), (numel, batch_size, seed)
        if theirs != own:
            raise ValueError(
                f"samples, batch_size and seed are {own}, but those of the training are {theirs}: an Elastic deals one "
                "data set, alike on all ranks; another one, as for validation, goes by a DataLoader"
            )
        if not self.deal.step_size <= numel:
            raise ValueError(f"a step takes {self.deal.step_size} samples, but there are {numel}: lower batch_size")

    def _follow(self) -> None:
        """Follows the changes of the group."""
        for change, members, commits in self._missed:
            assert self.deal is not None
            held = [] if commits else self._held  # at a commit all that ranks had drawn before came into the model
            lost = set(change.members) - set(members)
            back = [batch for then, end in held for batch in end.held(then, lost)]
            self._held = [*held, (self.deal, change)]
            self.deal = self.deal.after(change, members, back)
        self._missed = []

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        until: int,
        collate: Callable[[list[Any]], Any],
        goes_on: Callable[[], bool],
    ) -> Iterator[Any]:
        """Batches of this rank until so many epochs are over.

        goes_on: whether this rank draws another one; it may change the group before.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, expected one with len() and samples by number: what is dealt "
                "again must be found again"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}, expected the samples of all ranks together, 1 or more")
        self.begin(len(dataset), batch_size, seed)
        while self.epochs < until:
            deal, before = self._where()
            owed = deal.owed_to(self.rank)[self.drawn :]
            if (epoch := owed[0][0] if owed else deal.epoch) > self.epochs:
                self.epochs = epoch  # the group has changed after the last step of an epoch
            elif not owed and self.drawn - before >= deal.steps:
                self._end_epoch(deal, before)
            elif not goes_on():
                return
            elif self._now is not None:  # the group is as it was
                batch = owed[0][1] if owed else deal.batch(self.rank, self.drawn - before)
                self.drawn += 1
                yield collate([dataset[sample] for sample in batch])

    def _where(self) -> tuple[Deal, int]:
        if self._now is None:
            assert self.deal is not None
            deal, before = self.deal, len(self.deal.owed_to(self.rank))
            while self.drawn > before + deal.steps:
                deal, before = deal.next_epoch(), before + deal.steps
            self._now = deal, before
            if deal.step_size > deal.batch_size:
                logger.warning(
                    "the global batch is %d, one sample for each rank, not batch_size=%d",
                    deal.step_size,
                    deal.batch_size,
                )
        return self._now

    def _end_epoch(self, deal: Deal, before: int) -> None:
        if len(deal.left_out):
            logger.warning(
                "%d samples of epoch %d are left out, because %d ranks share them",
                len(deal.left_out),
                deal.epoch,
                deal.ranks,
            )
        self.epochs, self._now = deal.epoch + 1, (deal.next_epoch(), before + deal.steps)
