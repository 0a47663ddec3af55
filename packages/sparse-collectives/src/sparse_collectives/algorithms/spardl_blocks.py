"""SparDL's blocks on one rank: those that it still holds, and what it has cut of them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from communicators import schedules
from sparse_compress import SparseVector, all_finite, cut_to_budgets, merge_to_budgets, share, vectors
from torch import Tensor

from sparse_collectives.wire import Wire, blame_rank


class Blocks:
    """Partial sums of some blocks, each cut to its budget; what is cut stays here (global residual collection, GRES).

    held: the blocks, increasing; all of them at first. kept: their entries, exactly budgets[b] of each block b.
    cuts: what was cut, and what the wire has rounded off, of every round.
    A NaN or inf in a block without a budget is said in another one, so that the total shows it.
    """

    def __init__(self, sparse: SparseVector, blocks: int, k: int, step: int, wire: Wire) -> None:
        self.wire, self.everywhere = wire, (0, sparse.numel)
        self.bounds = schedules.block_bounds(sparse.numel, blocks)
        self.budgets = block_budgets(k, sparse.numel, blocks, step)
        self.held = list(range(blocks))
        self.kept, cut = cut_to_budgets(sparse, self.bounds, self.budgets)
        self.cuts = [cut]
        if 0 in self.budgets:
            finite = all_finite(cut.values)
            self.kept.values[0] = torch.where(finite, self.kept.values[0], torch.nan)

    def give(self, members: Sequence[int]) -> Tensor:
        """The bytes of these blocks, which are then not held any more; what the wire rounds off stays here."""
        ends = accumulate((self.budgets[b] for b in self.held), initial=0)
        runs = {b: slice(*run) for b, run in zip(self.held, pairwise(ends), strict=True)}
        given = vectors.take(self.kept, [runs[b] for b in self.held if b in members])
        self.held = [b for b in self.held if b not in members]
        self.kept = vectors.take(self.kept, [runs[b] for b in self.held])
        given, rest = self.wire.rounded(given)
        self.cuts.append(rest)
        return self.wire.block(given, self.everywhere)

    def add(self, body: Tensor, members: Sequence[int], source: int) -> None:
        """Adds what another rank gives of these blocks, which are held, and cuts the sums to the budgets.

        InvalidMessageError where it is not that; on a GPU it is trusted to be.
        """
        with blame_rank(source):
            theirs = self.wire.entries(body, self.everywhere, self.kept, self._entries(members))
            if theirs.is_cpu:
                self._check(theirs, members)
        bounds, budgets = zip(*((self.bounds[b], self.budgets[b]) for b in self.held), strict=True)
        self.kept, cut = merge_to_budgets(self.kept, theirs, bounds, budgets)
        self.cuts.append(cut)

    def own(self, b: int, team: int, teams: int) -> Tensor:
        """The bytes of block b, the last that is held, as all ranks get it; teams share what the wire rounds off."""
        self.kept, rest = self.wire.rounded(self.kept)
        self.cuts.append(share(rest, member=team, of=teams))
        return self.wire.block(self.kept, self.bounds[b])

    def nbytes(self, members: Sequence[int]) -> int:
        """Bytes of these blocks in one message."""
        return self.wire.block_nbytes(self._entries(members), self.kept.numel, self.kept.dtype)

    def _check(self, theirs: SparseVector, members: Sequence[int]) -> None:
        """Raises ValueError unless these blocks have as many entries as their budgets, each."""
        edges = np.array([self.bounds[b] for b in members], np.int32)
        found = np.diff(np.searchsorted(theirs.indices.numpy(), edges), axis=1)[:, 0].tolist()
        expected = [self.budgets[b] for b in members]
        if found != expected:
            raise ValueError(f"blocks {list(members)} have {found} entries, expected {expected}")

    def _entries(self, members: Sequence[int]) -> int:
        return sum(self.budgets[b] for b in members)


def block_budgets(k: int, numel: int, blocks: int, step: int) -> list[int]:
    """Entries that each block may have: ⌊(b + 1 + o)k/T⌋ − ⌊(b + o)k/T⌋, at most its length; at most k in all.

    T: blocks that have elements, numbered b. o: 0 where k ≥ T, else the step number, so that every block gets its turn.
    """
    k, budgets = min(k, numel), [0] * blocks
    filled = [(b, high - low) for b, (low, high) in enumerate(schedules.block_bounds(numel, blocks)) if high > low]
    o = 0 if k >= len(filled) else step
    for j, (b, length) in enumerate(filled):
        budgets[b] = min((j + 1 + o) * k // len(filled) - (j + o) * k // len(filled), length)
    return budgets
