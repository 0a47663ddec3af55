"""SparDL: every block is summed at its owner, cut to its budget on the way, and gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from communicators import Payload, Round, Schedule, schedules
from sparse_compress import LargestOfBlocks, Selection, SparseVector, all_finite
from torch import Tensor

from sparse_collectives.algorithm import Algorithm, Array
from sparse_collectives.algorithms.among import among
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.spardl_blocks import Blocks, block_budgets
from sparse_collectives.algorithms.spardl_reference import spardl_reference
from sparse_collectives.algorithms.spardl_teams import (
    SAG,
    combine_sent,
    combine_teams,
    divisors_of,
    is_recursive,
    sent_entries,
)
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State, check_values, is_count
from sparse_collectives.traffic import Traffic
from sparse_collectives.wire import joined

LEAST = 1
"""B-SAG's h from an earlier call, where it only bounds from below: ⌈B/d⌉ entries are sent then."""


@dataclass(frozen=True)
class SparDL(Algorithm):
    """Sum over ranks with at most k entries, selected block by block (Zhao et al., ICDE 2024).

    d teams of T = P/d ranks; T blocks of the index range, each with a budget of about k/T entries.

        Spar-Reduce-Scatter in each team      after ⌈log T⌉ rounds, rank r of the team has its sum of block r
        Spar-All-Gather                       the d sums of one block become one (d > 1, see `spardl_teams`)
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
        """Checks that teams divide P, and that sag is possible for them.

        Args:
            size: P.

        Raises:
            ValueError: They do not, or it is not.
        """
        if self.teams < 1 or size % self.teams:
            divisors = ", ".join(map(str, divisors_of(size)))
            raise ValueError(f"teams is {self.teams}, expected a divisor of the {size} ranks: {divisors}")
        if self.sag not in SAG:
            raise ValueError(f"sag is {self.sag!r}, expected one of {', '.join(SAG)}")
        if self.sag == "r-sag" and self.teams & (self.teams - 1):
            raise ValueError(f"sag='r-sag' needs a power of two of teams, not {self.teams}: take sag='b-sag'")

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        state, wire, teams = self.initial_state() if state is None else state, self.wire, self.teams
        team, position = divmod(rank, size // teams)
        mates = range(team * (size // teams), (team + 1) * (size // teams))
        blocks = Blocks(sparse, len(mates), k, state["step"], wire)
        yield from among(mates, spar_reduce_scatter(blocks, position, len(mates)))
        settings = [k, size, teams]
        entries = before = state["entries"] if state["of"] == settings else None
        if teams > 1:
            others = range(position, size, len(mates))
            entries = yield from among(others, combine_teams(blocks, position, team, teams, self.sag, before))
        lengths = [high - low for low, high in blocks.bounds]
        sizes = [wire.block_nbytes(*sized, sparse.dtype) for sized in zip(blocks.budgets, lengths, strict=True)]
        own = blocks.own(position, team, teams)
        bodies = yield from among(mates, schedules.allgather_blocks(own, sizes, position, len(mates)))
        total = joined(wire, bodies, blocks.bounds, blocks.budgets, sparse, mates)
        if entries != before and not bool(all_finite(total.values)):  # alike on all ranks
            entries = before
        state.update(step=state["step"] + 1, entries=entries, of=settings)
        return Reduction(total, blocks.dropped())

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
        """Every block but the own once, the own as `combine_sent` says, and Bruck's share; one slot a message.

        Where T divides k: 2k(T − 1)/T entries of 8 bytes (float64: 12) for d = 1.

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
        bounds = schedules.block_bounds(numel, ranks)
        low, high = bounds[position]
        budgets = block_budgets(k, numel, ranks, state["step"])
        sizes = [wire.block_nbytes(b, last - first, dtype) for b, (first, last) in zip(budgets, bounds, strict=True)]
        gather = Traffic.allgather(sizes, position)
        given = [wire.block_nbytes(entries, numel, dtype) for entries in _given(budgets, position)]
        scatter = Traffic.of_bodies(sum(given), len(given), len(given))
        if self.teams == 1:
            return Traffic.total(scatter, gather)
        before = state["entries"] if state["of"] == [k, size, self.teams] else None
        between = combine_sent(team, self.teams, self.sag, budgets[position], high - low, dtype, before, wire)
        return Traffic.total(scatter, between, gather)

    def typical(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """A call where the teams select unlike entries, so that B-SAG's h has come down to ⌈B/d⌉."""
        adapted = {"step": 0, "entries": LEAST, "of": [k, size, self.teams]}
        return self.sent(rank, size, k, numel, dtype, state=adapted)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """Two blocks for each addition of this rank, and those between teams, typically."""
        teams, ranks = self.teams, size // self.teams
        team, position = divmod(rank, ranks)
        budgets = block_budgets(k, numel, ranks, 0)
        onwards, held, merged = budgets[position:] + budgets[:position], ranks, 0
        for distance in reversed(list(schedules.powers_of_two(below=ranks))):
            merged += 2 * sum(onwards[: held - distance])
            held = distance
        if teams == 1:
            return merged
        if is_recursive(teams, self.sag):
            return merged + GTopK().merged(team, teams, onwards[0], numel)
        return merged + teams * sent_entries(LEAST, onwards[0], teams) * (teams - 1).bit_length()

    def variants(self, size: int) -> Sequence[Mapping[str, Any]]:
        """Every number of teams that P ranks can have; not P of them where that is a power of two: that is gTop-k."""
        is_gtopk = size > 1 and not size & (size - 1)
        return [{"teams": teams} for teams in divisors_of(size) if teams < size or not is_gtopk]

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        return spardl_reference(inputs, k, teams=self.teams, sag=self.sag)


def spar_reduce_scatter(blocks: Blocks, rank: int, size: int) -> Schedule[None]:
    """Leaves on rank r the sum of block r over all ranks, cut to its budget after every addition; any P.

    A rank holds partial sums of the blocks rank + j, j < m (m = P at first). With distance D it gives those from D on
    to rank + D, which holds them at j − D, and has D left: every block goes round by ever shorter hops to its owner.
    """
    held = size
    for distance in reversed(list(schedules.powers_of_two(below=size))):
        to, source = (rank + distance) % size, (rank - distance) % size
        gives = [(rank + j) % size for j in range(distance, held)]
        takes = [(rank + j) % size for j in range(held - distance)]
        received = yield Round({to: Payload.of(blocks.give(gives))}, {source: blocks.nbytes(takes)})
        blocks.add(received[source].body, takes, source)
        held = distance


def _given(budgets: list[int], position: int) -> list[int]:
    """Entries of each message of the reduce-scatter: all blocks but the own, the farthest half of them first."""
    onwards, held, given = budgets[position:] + budgets[:position], len(budgets), []
    for distance in reversed(list(schedules.powers_of_two(below=len(budgets)))):
        given.append(sum(onwards[distance:held]))
        held = distance
    return given
