"""Dealing the samples of a data set to ranks that come and go: each is taken once an epoch.

In a generation of P ranks step j covers the next B of the samples that remain, and rank r takes the r-th of P nearly
equal blocks of them. When the group changes, what its ranks have drawn is gone, and all else is dealt again among the
new ones: also what a dead rank has drawn since the last commit, of which nothing is in the model.

Survivors hold on to what they had drawn, and train on it in the next generation. What one of them takes along that dies
there before the first commit comes back at the change that follows. Who had drawn less than another one draws first
what it would have drawn: so all come to the end of an epoch after equally many steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Batch = tuple[int, tuple[int, ...]]
"""Epoch and samples."""


@dataclass(frozen=True)
class Change:
    """End of a generation.

    Attributes:
        members: Names of its ranks.
        drawn: Batches that each had drawn: a dead one, at its last commit.
        committed: Those of them that it had drawn by its last commit.
    """

    members: tuple[str, ...]
    drawn: tuple[int, ...]
    committed: tuple[int, ...]

    def held(self, deal: Deal, lost: Collection[str]) -> list[Batch]:
        """Batches that these ranks had drawn since the last commit. deal: place at the beginning of the generation."""
        each = enumerate(zip(self.members, self.committed, self.drawn, strict=True))
        return [one for rank, (name, *span) in each if name in lost for one in deal.batches(rank, *span)]


@dataclass(frozen=True)
class Deal:
    """Place in an epoch, alike on all ranks.

    Attributes:
        numel: Samples of the data set.
        batch_size: Global batch B, of all ranks together.
        seed: Seed of the order, which differs from epoch to epoch.
        ranks: P.
        epoch: Number of the epoch, from 0.
        owed: By rank, epoch and samples of batches of former generations that it draws first; () is none.
        past: What former generations have drawn: epoch, P, batches in that epoch by rank, and samples of it that come
            back afterwards. P = 0: all that remained. Ranks that are not in step may have drawn of later epochs
            already.
    """

    numel: int
    batch_size: int
    seed: int
    ranks: int
    epoch: int = 0
    owed: tuple[tuple[Batch, ...], ...] = ()
    past: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def step_size(self) -> int:
        """Samples of a step: B, or one for each rank where there are more of them."""
        return max(self.batch_size, self.ranks)

    @cached_property
    def remaining(self) -> Tensor:
        """Samples of the epoch that were not dealt before this generation, in their order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        remaining = torch.randperm(self.numel, generator=generator, device="cpu")
        for epoch, ranks, drawn, back in self.past:
            if epoch == self.epoch:
                keeps = ~_taken(len(remaining), max(self.batch_size, ranks), ranks, drawn) if ranks else slice(0)
                remaining = torch.cat([remaining[keeps], torch.tensor(back, dtype=torch.int64, device="cpu")])
        return remaining

    @property
    def steps(self) -> int:
        """Steps to the end of the epoch, if the group stays."""
        return _steps(len(self.remaining), self.step_size, self.ranks)

    @property
    def left_out(self) -> Tensor:
        """Samples that nobody takes, because fewer than P remain."""
        return self.remaining if not self.steps else self.remaining[:0]

    def batch(self, rank: int, step: int) -> list[int]:
        """Samples that a rank takes in a step of this generation."""
        low, high = _span(len(self.remaining), self.step_size, self.ranks, rank, step)
        samples: list[int] = self.remaining[low:high].tolist()
        return samples

    def next_epoch(self) -> Deal:
        """Beginning of the next epoch, among the same ranks."""
        return replace(self, epoch=self.epoch + 1, past=tuple(one for one in self.past if one[0] > self.epoch))

    def owed_to(self, rank: int) -> tuple[Batch, ...]:
        """Batches of former generations that a rank draws first."""
        return self.owed[rank] if self.owed else ()

    def batches(self, rank: int, first: int, last: int) -> Iterator[Batch]:
        """A rank's batches from one number to another, counted from this place on."""
        owed = self.owed_to(rank)
        yield from owed[first:last]
        deal, before = self, len(owed)
        for number in range(len(owed), last):
            while number >= before + deal.steps:
                deal, before = deal.next_epoch(), before + deal.steps
            if number >= first:
                yield deal.epoch, tuple(deal.batch(rank, number - before))

    def after(self, change: Change, members: Sequence[str], back: Sequence[Batch] = ()) -> Deal:
        """Place of the next generation.

        Args:
            change: End of this generation.
            members: Names of the ranks of the next one.
            back: Batches that were drawn in earlier generations, and come back.
        """
        owed = [self.owed_to(rank) for rank in range(self.ranks)]
        counts = [max(0, drawn - len(own)) for drawn, own in zip(change.drawn, owed, strict=True)]
        most = max((count for name, count in zip(change.members, counts, strict=True) if name in members), default=0)
        owes, lost = dict[str, tuple[Batch, ...]](), list(back)
        for rank, (name, drawn) in enumerate(zip(change.members, change.drawn, strict=True)):
            if name in members:
                behind = len(owed[rank]) + counts[rank], len(owed[rank]) + most
                owes[name] = *owed[rank][drawn:], *self.batches(rank, *behind)
                counts[rank] = most
            else:
                lost += owed[rank][drawn:]
        deal = self._after(counts, len(members), lost)
        return replace(deal, owed=tuple(owes.get(name, ()) for name in members) if any(owes.values()) else ())

    def _after(self, counts: Sequence[int], ranks: int, back: Sequence[Batch]) -> Deal:
        """Place of the next generation: in the first epoch that some rank has not finished. counts: of new batches."""
        past, deal, first, left = list(self.past), self, self, list(counts)
        while any(left):
            here = [min(count, deal.steps) for count in left]
            past.append((deal.epoch, self.ranks, tuple(here), ()))
            left = [count - taken for count, taken in zip(left, here, strict=True)]
            finished, deal = min(here) == deal.steps, deal.next_epoch()
            first = deal if finished and first.epoch == deal.epoch - 1 else first
        begin = min([first.epoch, *(epoch for epoch, _ in back)])
        for epoch in range(begin, max([first.epoch, *(epoch + 1 for epoch, _ in back)])):
            again = tuple(sample for one, samples in back if one == epoch for sample in samples)
            past.append((epoch, 0 if epoch < self.epoch else self.ranks, (0,) * self.ranks, again))
        return replace(self, ranks=ranks, epoch=begin, past=tuple(one for one in past if one[0] >= begin))


def _steps(numel: int, size: int, ranks: int) -> int:
    """Steps that so many samples make; a last one in which some rank would take none is part of the step before."""
    whole, rest = divmod(numel, size)
    return whole + (rest >= ranks)


def _span(numel: int, size: int, ranks: int, rank: int, step: int) -> tuple[int, int]:
    """Bounds of a rank's block of a step."""
    begin = step * size
    end = numel if step == _steps(numel, size, ranks) - 1 else begin + size
    return begin + rank * (end - begin) // ranks, begin + (rank + 1) * (end - begin) // ranks


def _taken(numel: int, size: int, ranks: int, drawn: Sequence[int]) -> Tensor:
    """Which of so many samples ranks have drawn, as bool."""
    taken, common = torch.zeros(numel, dtype=torch.bool, device="cpu"), min(drawn)
    if common:
        taken[: _span(numel, size, ranks, ranks - 1, common - 1)[1]] = True
    for rank, count in enumerate(drawn):
        for step in range(common, count):
            taken[slice(*_span(numel, size, ranks, rank, step))] = True
    return taken
