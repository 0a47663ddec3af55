"""What SparDL sends and merges: exactly, from its state, and in the midst of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from communicators.dense_schedules import block_bounds
from communicators.schedule import SLOT_BYTES, powers_of_two

from sparse_collectives.algorithms.budgets import block_budgets
from sparse_collectives.algorithms.gtopk import gtopk_merged
from sparse_collectives.algorithms.spardl import spardl_state
from sparse_collectives.algorithms.spardl_teams import combine_sent, divisors_of, is_recursive, sent_entries
from sparse_collectives.prediction.traffic import Traffic, bruck_sent, together
from sparse_collectives.state import State
from sparse_collectives.wire.wire import PLAIN, Wire

LEAST = 1
"""B-SAG's h from an earlier call, where it only bounds from below: ⌈B/d⌉ entries are sent then."""


def spardl_sent(
    rank: int,
    size: int,
    k: int,
    numel: int,
    dtype: torch.dtype,
    *,
    teams: int = 1,
    sag: str = "auto",
    state: State | None = None,
    wire: Wire = PLAIN,
) -> Traffic:
    """Every block but the own once, the own as `combine_sent` says, and Bruck's share; one slot a message.

    state: as it is before the call. Where T divides k: 2k(T − 1)/T entries of 8 bytes (float64: 12) for d = 1.
    """
    state = spardl_state() if state is None else state
    ranks = size // teams
    team, position = divmod(rank, ranks)
    bounds = block_bounds(numel, ranks)
    low, high = bounds[position]
    budgets = block_budgets(k, numel, ranks, state["step"])
    sizes = [wire.block_nbytes(b, last - first, dtype) for b, (first, last) in zip(budgets, bounds, strict=True)]
    gather = bruck_sent(sizes, position)
    given = [wire.block_nbytes(entries, numel, dtype) for entries in _given(budgets, position)]
    scatter = Traffic(sum(given) + len(given) * SLOT_BYTES, len(given), len(given))
    if teams == 1:
        return together(scatter, gather)
    before = state["entries"] if state["of"] == [k, size, teams] else None
    between = combine_sent(team, teams, sag, budgets[position], high - low, dtype, before, wire)
    return together(scatter, between, gather)


def _given(budgets: list[int], position: int) -> list[int]:
    """Entries of each message of the reduce-scatter: all blocks but the own, the farthest half of them first."""
    onwards, held, given = budgets[position:] + budgets[:position], len(budgets), []
    for distance in reversed(list(powers_of_two(below=len(budgets)))):
        given.append(sum(onwards[distance:held]))
        held = distance
    return given


def spardl_typical(
    rank: int,
    size: int,
    k: int,
    numel: int,
    dtype: torch.dtype,
    *,
    teams: int = 1,
    sag: str = "auto",
    wire: Wire = PLAIN,
) -> Traffic:
    """A call where the teams select unlike entries, so that B-SAG's h has come down to ⌈B/d⌉."""
    adapted = {"step": 0, "entries": LEAST, "of": [k, size, teams]}
    return spardl_sent(rank, size, k, numel, dtype, teams=teams, sag=sag, state=adapted, wire=wire)


def spardl_merged(rank: int, size: int, k: int, numel: int, *, teams: int = 1, sag: str = "auto") -> int:
    """Entries that the additions of this rank take in: two blocks each, and those between teams, typically."""
    ranks = size // teams
    team, position = divmod(rank, ranks)
    budgets = block_budgets(k, numel, ranks, 0)
    onwards, held, merged = budgets[position:] + budgets[:position], ranks, 0
    for distance in reversed(list(powers_of_two(below=ranks))):
        merged += 2 * sum(onwards[: held - distance])
        held = distance
    if teams == 1:
        return merged
    if is_recursive(teams, sag):
        return merged + gtopk_merged(team, teams, onwards[0], numel)
    return merged + teams * sent_entries(LEAST, onwards[0], teams) * (teams - 1).bit_length()


def spardl_variants(size: int) -> list[Mapping[str, Any]]:
    """Every number of teams that P ranks can have; not P of them where that is a power of two: it would be gTop-k."""
    is_gtopk = size > 1 and not size & (size - 1)
    return [{"teams": teams} for teams in divisors_of(size) if teams < size or not is_gtopk]
