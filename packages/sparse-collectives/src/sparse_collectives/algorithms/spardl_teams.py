"""SparDL's Spar-All-Gather: the ranks at one position of all teams make one block of their teams' sums."""

from __future__ import annotations

import torch
from communicators import Schedule, schedules
from sparse_compress import SparseVector, add_all, merge, share, vectors

from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.spardl_blocks import Blocks
from sparse_collectives.traffic import Traffic
from sparse_collectives.wire import RAW, Wire, blame_rank

SAG = ("auto", "r-sag", "b-sag")


def divisors_of(size: int) -> list[int]:
    """The numbers of teams that so many ranks can have."""
    return [teams for teams in range(1, size + 1) if not size % teams]


def is_recursive(teams: int, sag: str) -> bool:
    """Whether it is R-SAG: as asked, or, for "auto", where the teams are a power of two."""
    return sag == "r-sag" or (sag == "auto" and not teams & (teams - 1))


def combine_teams(
    blocks: Blocks,
    b: int,
    team: int,
    teams: int,
    sag: str,
    before: int | None = None,
) -> Schedule[int | None]:
    """Makes block b, which every team has summed by itself, the same in all teams; peers are teams.

    R-SAG: recursive doubling with a cut after every merge, which is gTop-k on the block. B-SAG: see `b_sag`.
    before: B-SAG's h, as the last call left it. Returns the next one, None for R-SAG.
    """
    (low, high), budget, entries = blocks.bounds[b], blocks.budgets[b], None
    block = vectors.of_entries(blocks.kept.indices - low, blocks.kept.values, high - low)
    if is_recursive(teams, sag):
        reduction = yield from GTopK(wire=blocks.wire).schedule(block, team, teams, budget)
        total, dropped = reduction.total, reduction.dropped
    else:
        h = sent_entries(before, budget, teams)
        total, dropped, entries = yield from b_sag(block, team, teams, budget, h, blocks.wire)
    blocks.kept, dropped = (vectors.of_entries(v.indices + low, v.values, blocks.kept.numel) for v in (total, dropped))
    blocks.cuts.append(dropped)
    return entries


def b_sag(
    block: SparseVector,
    team: int,
    teams: int,
    budget: int,
    h: int,
    wire: Wire = RAW,
) -> Schedule[tuple[SparseVector, SparseVector, int]]:
    """The block's h largest entries of every team, gathered, added (`add_all`), and cut once; any number of teams.

    What a team cuts before the gather it keeps; entry i of the common cut is kept by team i mod d.
    Returns what is kept, dropped, and the next h: the gathered union should just fill the budget B, so with L entries
    in it, h ← min(B, max(⌈B/d⌉, ⌊h·B/L⌋)), the same in all teams.
    """
    given, dropped = merge(block, _nothing(block), h)
    given, rest = wire.rounded(given)
    span, nbytes = (0, block.numel), [wire.block_nbytes(h, block.numel, block.dtype)] * teams
    bodies = yield from schedules.allgather_blocks(wire.block(given, span), nbytes, team, teams)
    given_by_teams = []
    for source, body in enumerate(bodies):
        with blame_rank(source):
            given_by_teams.append(wire.entries(body, span, block, h))
    total, cut = merge(add_all(given_by_teams), _nothing(block), budget)
    union = len(torch.unique(torch.cat([vector.indices for vector in given_by_teams])))  # on a GPU this reads back
    entries = min(budget, max(-(-budget // teams), h * budget // max(union, 1)))
    return total, add_all([dropped, rest, share(cut, member=team, of=teams)]), entries


def sent_entries(before: int | None, budget: int, teams: int) -> int:
    """B-SAG's h for a block of this budget B: all of B at first, and never less than ⌈B/d⌉."""
    return budget if before is None else min(budget, max(before, -(-budget // teams)))


def combine_sent(
    team: int,
    teams: int,
    sag: str,
    budget: int,
    length: int,
    dtype: torch.dtype,
    before: int | None,
    wire: Wire = RAW,
) -> Traffic:
    """R-SAG: log d messages of B entries, with headers. B-SAG: (d − 1)·h entries in ⌈log d⌉ messages with a slot."""
    if is_recursive(teams, sag):
        return GTopK(wire=wire).sent(team, teams, budget, length, dtype)
    return Traffic.allgather([wire.block_nbytes(sent_entries(before, budget, teams), length, dtype)] * teams, team)


def _nothing(block: SparseVector) -> SparseVector:
    return SparseVector.empty(block.numel, block.dtype, device=block.device)
