"""SparDL: every block is summed at its owner, cut to its budget on the way, and gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from communicators import Payload, Round, Schedule, schedules
from sparse_compress import LargestOfBlocks, Selection, SparseVector, add_all, all_finite, merge, share, vectors
from torch import Tensor

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic, check_values, is_count
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.reference import cut, tree
from sparse_collectives.algorithms.spardl_blocks import Blocks, block_budgets
from sparse_collectives.wire import InvalidMessageError, Wire, blame_rank, joined

T = TypeVar("T")
SAG = ("auto", "r-sag", "b-sag")
LEAST = 1
"""B-SAG's h from an earlier call, where it only bounds from below: ⌈B/d⌉ entries are sent then."""


@dataclass(frozen=True)
class SparDL(Algorithm):
    """Sum over ranks with at most k entries, selected block by block (Zhao et al., ICDE 2024).

    d teams of T = P/d ranks; T blocks of the index range, each with a budget of about k/T entries.

        Spar-Reduce-Scatter in each team      after ⌈log T⌉ rounds, rank r of the team has its sum of block r
        Spar-All-Gather                       the d sums of one block become one (d > 1): R-SAG or B-SAG
        all-gather in each team               Bruck, ⌈log T⌉ rounds

    Whatever is cut to a budget stays with the rank that cuts it (global residual collection). Vectors are cut to the
    budgets first; those of `select` need no cut.
    Differs from the paper: budgets are exact in integers and turn with the step where k < T, so that no block starves.

    Args:
        teams: d, divides P.
        sag: "r-sag" (d a power of two), "b-sag", or "auto": "r-sag" where possible.
        wire: Encoding of the vectors; rounding errors stay with the rank that sends.
    """

    name = "spardl"
    takes_wire = True
    teams: int = 1
    sag: str = "auto"

    def check(self, size: int) -> None:
        """Checks that teams divide P, and that sag is possible for them."""
        if self.teams < 1 or size % self.teams:
            divisors = ", ".join(map(str, _divisors(size)))
            raise ValueError(f"teams is {self.teams}, expected a divisor of the {size} ranks: {divisors}")
        if self.sag not in SAG:
            raise ValueError(f"sag is {self.sag!r}, expected one of {', '.join(SAG)}")
        if self.sag == "r-sag" and self.teams & (self.teams - 1):
            raise ValueError(f"sag='r-sag' needs a power of two of teams, not {self.teams}: take sag='b-sag'")

    def fitted(self, size: int) -> SparDL:
        """Algorithm with gcd(d, P) teams, which divide P."""
        fitted = replace(self, teams=math.gcd(self.teams, size)) if self.teams > 0 else self
        fitted.check(size)
        return fitted

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        state, teams, ranks = self.initial_state() if state is None else state, self.teams, size // self.teams
        team, position = divmod(rank, ranks)
        mates = range(team * ranks, (team + 1) * ranks)
        blocks = Blocks(sparse, ranks, k, state["step"], self.wire)
        yield from _among(mates, spar_reduce_scatter(blocks, position, ranks))
        settings = [k, size, teams]
        entries = before = state["entries"] if state["of"] == settings else None
        if teams > 1:
            entries = yield from _among(range(position, size, ranks), self._combine(blocks, position, team, before))
        sizes = _sizes(blocks.bounds, blocks.budgets, sparse.dtype, self.wire)
        own = blocks.own(position, team, teams)
        bodies = yield from _among(mates, schedules.allgather_blocks(own, sizes, position, ranks))
        total = joined(self.wire, bodies, blocks.bounds, blocks.budgets, sparse, mates)
        if entries != before and not bool(all_finite(total.values)):  # alike on all ranks
            entries = before
        state.update(step=state["step"] + 1, entries=entries, of=settings)
        return Reduction(total, add_all(blocks.cuts))

    def _combine(self, blocks: Blocks, b: int, team: int, before: int | None) -> Schedule[int | None]:
        """Makes block b the same in all teams, which are the peers (Spar-All-Gather); returns B-SAG's next h.

        R-SAG: recursive doubling with a cut after every merge, which is gTop-k on the block. B-SAG: see `b_sag`.
        """
        (low, high), budget, entries = blocks.bounds[b], blocks.budgets[b], None
        block = vectors.of_entries(blocks.kept.indices - low, blocks.kept.values, high - low)
        if self._is_recursive:
            reduction = yield from GTopK(wire=self.wire).schedule(block, team, self.teams, budget)
        else:
            reduction, entries = yield from b_sag(block, team, self.teams, budget, before, self.wire)
        parts = (reduction.total, reduction.dropped)
        blocks.kept, dropped = (vectors.of_entries(v.indices + low, v.values, blocks.kept.numel) for v in parts)
        blocks.cuts.append(dropped)
        return entries

    @property
    def _is_recursive(self) -> bool:
        """Whether it is R-SAG: as asked, or, for "auto", where the teams are a power of two."""
        return self.sag == "r-sag" or (self.sag == "auto" and not self.teams & (self.teams - 1))

    def select(self, like: Tensor, rank: int, size: int, k: int, state: State | None) -> Selection:
        """The largest entries of every block, as many as its budget; and a NaN or inf of a block that has none."""
        bounds = schedules.block_bounds(like.numel(), size // self.teams)
        return LargestOfBlocks(bounds, block_budgets(k, like.numel(), len(bounds), state["step"] if state else 0))

    def initial_state(self) -> State:
        """The state before the first call.

        step: calls so far, which turn the budgets where k < T. entries: B-SAG's h, as the last call with a finite total
        left it. of: the k, P and d that h is for.
        """
        return {"step": 0, "entries": None, "of": None}

    def check_state(self, state: State) -> None:
        check_values(
            state,
            {
                "step": is_count,
                "entries": lambda entries: entries is None or is_count(entries),
                "of": lambda of: of is None or (isinstance(of, list) and len(of) == 3 and all(map(is_count, of))),
            },
        )

    def sent(
        self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype, *, state: State | None = None
    ) -> Traffic:
        """Every block but the own once, the own between teams, and Bruck's share of the blocks; one slot a message.

        Where T divides k: 2k(T − 1)/T entries of 8 bytes (float64: 12) for d = 1. Between teams, R-SAG: log d messages
        of B entries, with headers; B-SAG: (d − 1)·h entries in ⌈log d⌉ messages.

        Args:
            rank: This rank.
            size: P.
            k: The most entries that a rank contributes.
            numel: n.
            dtype: Of the gradient.
            state: As it is before the call.
        """
        state, wire, ranks = self.initial_state() if state is None else state, self.wire, size // self.teams
        team, position = divmod(rank, ranks)
        bounds, budgets = schedules.block_bounds(numel, ranks), block_budgets(k, numel, ranks, state["step"])
        onwards = budgets[position:] + budgets[:position]
        given = [wire.block_nbytes(sum(onwards[d:held]), numel, dtype) for d, held in _hops(ranks)]
        scatter = Traffic.of_bodies(sum(given), len(given), len(given))
        gather = Traffic.allgather(_sizes(bounds, budgets, dtype, wire), position)
        budget, length = budgets[position], bounds[position][1] - bounds[position][0]
        if self._is_recursive:
            between = GTopK(wire=wire).sent(team, self.teams, budget, length, dtype)
        else:
            h = _sent_entries(state["entries"] if state["of"] == [k, size, self.teams] else None, budget, self.teams)
            between = Traffic.allgather([wire.block_nbytes(h, length, dtype)] * self.teams, team)
        return Traffic.total(scatter, between, gather)

    def typical(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """A call where the teams select unlike entries, so that B-SAG's h has come down to ⌈B/d⌉."""
        return self.sent(rank, size, k, numel, dtype, state={"step": 0, "entries": LEAST, "of": [k, size, self.teams]})

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """Two blocks for each addition of this rank, and those between teams, typically."""
        teams, ranks = self.teams, size // self.teams
        team, position = divmod(rank, ranks)
        budgets = block_budgets(k, numel, ranks, 0)
        onwards = budgets[position:] + budgets[:position]
        merged = 2 * sum(sum(onwards[: held - distance]) for distance, held in _hops(ranks))
        if self._is_recursive:
            return merged + GTopK().merged(team, teams, onwards[0], numel)
        return merged + teams * _sent_entries(LEAST, onwards[0], teams) * (teams - 1).bit_length()

    def variants(self, size: int) -> Sequence[Mapping[str, Any]]:
        """Every number of teams that P ranks can have; not P of them where that is a power of two: that is gTop-k."""
        is_gtopk = size > 1 and not size & (size - 1)
        return [{"teams": teams} for teams in _divisors(size) if teams < size or not is_gtopk]

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """Each block summed in each team, then over teams: R-SAG merges pairwise; B-SAG adds all at once, then cuts."""
        selected, total = [cut(x, k) for x in inputs], np.zeros_like(inputs[0])
        ranks, n = len(inputs) // self.teams, len(total)
        filled = [b for b in range(ranks) if (b + 1) * n // ranks > b * n // ranks]
        budgets = np.diff([j * min(k, n) // len(filled) for j in range(len(filled) + 1)]).tolist()
        for b, budget in zip(filled, budgets, strict=True):
            block = slice(b * n // ranks, (b + 1) * n // ranks)
            teams = [
                [selected[first + (b - j) % ranks][block] for j in range(ranks)]
                for first in range(0, len(inputs), ranks)
            ]
            sums = [_sum_in_hops(team, budget) for team in teams]
            total[block] = GTopK().reference(sums, budget) if self._is_recursive else cut(tree(sums), budget)
        return total


def _sum_in_hops(partials: Sequence[Array], budget: int) -> Array:
    """partials[j], of the rank j hops before a block's owner, are added up in ever shorter hops, with cuts."""
    partials = [cut(x, budget) for x in partials]
    while len(partials) > 1:
        distance = 1 << ((len(partials) - 1).bit_length() - 1)
        for j in range(distance, len(partials)):
            partials[j - distance] = cut(partials[j - distance] + partials[j], budget)
        del partials[distance:]
    return partials[0]


def spar_reduce_scatter(blocks: Blocks, rank: int, size: int) -> Schedule[None]:
    """Leaves on rank r the sum of block r over all ranks, cut to its budget after every addition; any P.

    A rank holds partial sums of the blocks rank + j, j < m (m = P at first). With distance D it gives those from D on
    to rank + D, which holds them at j − D, and has D left: every block goes round by ever shorter hops to its owner.
    """
    for distance, held in _hops(size):
        to, source = (rank + distance) % size, (rank - distance) % size
        gives = [(rank + j) % size for j in range(distance, held)]
        takes = [(rank + j) % size for j in range(held - distance)]
        received = yield Round({to: Payload.of(blocks.give(gives))}, {source: blocks.nbytes(takes)})
        blocks.add(received[source].body, takes, source)


def b_sag(
    block: SparseVector, team: int, teams: int, budget: int, before: int | None, wire: Wire
) -> Schedule[tuple[Reduction, int]]:
    """The block's h largest entries of every team, gathered, added (`add_all`), and cut once; any number of teams.

    What a team cuts before the gather it keeps; entry i of the common cut is kept by team i mod d. before: h as the
    last call left it.
    Returns the reduction and the next h: the gathered union should just fill the budget B, so with L entries in it,
    h ← min(B, max(⌈B/d⌉, ⌊h·B/L⌋)), the same in all teams.
    """
    nothing = SparseVector.empty(block.numel, block.dtype, device=block.device)
    h = _sent_entries(before, budget, teams)
    given, dropped = merge(block, nothing, h)
    given, rest = wire.rounded(given)
    span, nbytes = (0, block.numel), [wire.block_nbytes(h, block.numel, block.dtype)] * teams
    bodies = yield from schedules.allgather_blocks(wire.block(given, span), nbytes, team, teams)
    given_by_teams = []
    for source, body in enumerate(bodies):
        with blame_rank(source):
            given_by_teams.append(wire.entries(body, span, block, h))
    total, cut = merge(add_all(given_by_teams), nothing, budget)
    union = len(torch.unique(torch.cat([vector.indices for vector in given_by_teams])))  # on a GPU this reads back
    entries = min(budget, max(-(-budget // teams), h * budget // max(union, 1)))
    return Reduction(total, add_all([dropped, rest, share(cut, member=team, of=teams)])), entries


def _among(ranks: Sequence[int], schedule: Schedule[T]) -> Schedule[T]:
    """A schedule of `ranks` that numbers its peers 0, 1, …; invalid bytes are blamed on the rank of the whole group."""
    try:
        return (yield from schedules.among(schedule, ranks, "spardl"))
    except InvalidMessageError as error:
        raise InvalidMessageError(None if error.rank is None else ranks[error.rank], error.problem) from error


def _hops(size: int) -> Iterable[tuple[int, int]]:
    """(distance, blocks held) of every round of the reduce-scatter, the longest first."""
    distances = list(schedules.powers_of_two(below=size))[::-1]
    return zip(distances, [size, *distances], strict=False)


def _sizes(bounds: Sequence[tuple[int, int]], budgets: Sequence[int], dtype: torch.dtype, wire: Wire) -> list[int]:
    """Bytes of every block."""
    return [wire.block_nbytes(b, high - low, dtype) for b, (low, high) in zip(budgets, bounds, strict=True)]


def _sent_entries(before: int | None, budget: int, teams: int) -> int:
    """B-SAG's h for a block of this budget B: all of B at first, and never less than ⌈B/d⌉."""
    return budget if before is None else min(budget, max(before, -(-budget // teams)))


def _divisors(size: int) -> list[int]:
    """The numbers of teams that so many ranks can have."""
    return [teams for teams in range(1, size + 1) if not size % teams]
