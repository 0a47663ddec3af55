"""Loads of an exchange's ranks, sent and merged; with very many ranks, only those that bound all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from communicators import schedules

from sparse_collectives.algorithms.table import resolve
from sparse_collectives.traffic import Traffic

EXACT_RANKS = 64
"""Up to so many every rank is looked at. An expression of one rank takes O(P): of 1,000, in all variants, minutes."""


class Load(NamedTuple):
    """Load of one rank. merged: entries."""

    sent: Traffic
    merged: int


def loads(
    algorithm: str, options: Mapping[str, Any], wire: str, *, size: int, numel: int, k: int, dtype: torch.dtype
) -> Sequence[Load]:
    """Loads of the ranks that `ranks_of_interest` names.

    If bytes depend on the data, they are those of random selections, or an upper bound.
    """
    return _loads(algorithm, tuple(sorted(options.items())), wire, size, numel, k, dtype)


def ranks_of_interest(size: int) -> Sequence[int]:
    """All ranks or, if there are very many, the first and the last of each role that an algorithm has.

    The roles: r < P − Q with a partner that folds into it, Q the largest power of two; other r < Q; r ≥ Q. Ranks of
    one role differ by an entry or an element a message, as blocks fall.
    """
    if size <= EXACT_RANKS:
        return range(size)
    group = schedules.largest_power_of_two(size)
    return sorted({0, size - group - 1, size - group, group - 1, group, size - 1} & set(range(size)))


@lru_cache(maxsize=1 << 11)  # every link and every simulated rank asks for the same
def _loads(
    algorithm: str, options: tuple[tuple[str, Any], ...], wire: str, size: int, numel: int, k: int, dtype: torch.dtype
) -> tuple[Load, ...]:
    selects = resolve(algorithm).selects
    entry = resolve(algorithm, dict(options), size=size, wire=wire if selects else "fp32", dtype=torch.float32)
    return tuple(
        Load(entry.typical(rank, size, k, numel, dtype), entry.merged(rank, size, k, numel) if size > 1 else 0)
        for rank in ranks_of_interest(size)
    )
