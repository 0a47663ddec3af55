"""What SparDL sends and merges: exactly, from its state, and in the midst of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from communicators.dense import block_bounds
from communicators.schedule import SLOT_BYTES, powers_of_two

from sparse_collectives.budgets import block_budgets
from sparse_collectives.entries import body_nbytes
from sparse_collectives.gtopk import gtopk_merged
from sparse_collectives.spardl import spardl_state
from sparse_collectives.spardl_teams import combine_sent, divisors_of, is_recursive, sent_entries
from sparse_collectives.state import State
from sparse_collectives.traffic import Traffic, bruck_sent, together

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
) -> Traffic:
    """Every block but the own once, the own as `combine_sent` says, and Bruck's share; one slot a message.

    state: as it is before the call. Where T divides k: 2k(T − 1)/T entries of 8 bytes (float64: 12) for d = 1.
    """
    state = spardl_state() if state is None else state
    ranks = size // teams
    team, position = divmod(rank, ranks)
    low, high = block_bounds(numel, ranks)[position]
    budgets = block_budgets(k, numel, ranks, state["step"])
    others = body_nbytes(sum(budgets) - budgets[position], dtype)
    gather = bruck_sent([body_nbytes(budget, dtype) for budget in budgets], position)
    scatter = Traffic(others + gather.messages * SLOT_BYTES, gather.messages, gather.rounds)
    if teams == 1:
        return together(scatter, gather)
    before = state["entries"] if state["of"] == [k, size, teams] else None
    between = combine_sent(team, teams, sag, budgets[position], high - low, dtype, before)
    return together(scatter, between, gather)


def spardl_typical(
    rank: int, size: int, k: int, numel: int, dtype: torch.dtype, *, teams: int = 1, sag: str = "auto"
) -> Traffic:
    """A call where the teams select unlike entries, so that B-SAG's h has come down to ⌈B/d⌉."""
    adapted = {"step": 0, "entries": LEAST, "of": [k, size, teams]}
    return spardl_sent(rank, size, k, numel, dtype, teams=teams, sag=sag, state=adapted)


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
    return merged + teams * sent_entries(LEAST, onwards[0], teams)


def spardl_variants(size: int) -> list[Mapping[str, Any]]:
    """Every number of teams that P ranks can have; not P of them where that is a power of two: it would be gTop-k."""
    is_gtopk = size > 1 and not size & (size - 1)
    return [{"teams": teams} for teams in divisors_of(size) if teams < size or not is_gtopk]
