"""What Ok-Topk sends: exactly, where it is known what the ranks hold, and at most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from communicators.dense import largest_power_of_two
from communicators.schedule import SLOT_BYTES

from sparse_collectives.even_out import even_counts, is_uneven, shifts
from sparse_collectives.kth_largest import kth_largest_sent, sum_sent
from sparse_collectives.traffic import Traffic, bruck_sent, together
from sparse_collectives.wire import PLAIN, Wire


def oktopk_traffic(
    rank: int,
    k: int,
    dtype: torch.dtype,
    *,
    given: Sequence[int],
    reached: int,
    kept: Sequence[int],
    edges: Sequence[int],
    boundaries: bool,
    wire: Wire = PLAIN,
) -> Traffic:
    """What a rank sends in a call.

    given: its entries in each region. reached: sums, of all ranks, that reach the threshold. kept: those in each
    region that are in the total. edges: of the regions. boundaries: whether they are agreed on anew.
    """
    size, lengths = len(given), [high - low for low, high in pairwise(edges)]
    sizes = [wire.block_nbytes(entries, length, dtype) for entries, length in zip(given, lengths, strict=True)]
    others = sum(sizes) - sizes[rank]
    parts = [
        Traffic(others + (size - 1) * SLOT_BYTES, size - 1, size - 1),
        bruck_sent([8] * size, rank),
        _gather(rank, dtype, kept, edges[-1], wire),
    ]
    if boundaries:
        parts.append(sum_sent(rank, size, 16 * largest_power_of_two(size)))
    if reached > k:
        parts += [kth_largest_sent(rank, size, dtype), bruck_sent([16] * size, rank)]
    return together(*parts)


def _gather(rank: int, dtype: torch.dtype, counts: Sequence[int], numel: int, wire: Wire) -> Traffic:
    """Evening out, where it is needed, in one round; then Bruck."""
    moved = Traffic(0, 0, 0)
    if is_uneven(counts):
        gives = [run.stop - run.start for to, run in shifts(counts, rank).items() if to != rank]
        takes = any(rank in shifts(counts, other) for other in range(len(counts)) if other != rank)
        nbytes = sum(wire.block_nbytes(entries, numel, dtype) + SLOT_BYTES for entries in gives)
        moved = Traffic(nbytes, len(gives), int(takes or bool(gives)))
        counts = even_counts(sum(counts), len(counts))
    return together(moved, bruck_sent([wire.block_nbytes(entries, numel, dtype) for entries in counts], rank))


def oktopk_sent(
    rank: int,
    size: int,
    k: int,
    numel: int,
    dtype: torch.dtype,
    *,
    thresholds_every: int = 32,
    boundaries_every: int = 64,
    wire: Wire = PLAIN,
) -> Traffic:
    """The most that a first call sends; later ones, that renew less, send less.

    Entries: k in the split, k in evening out, (P − 1)·⌈k/P⌉ in the gather, so 6k elements where P divides k. Besides,
    the same for any k and n: 4 sums of 1 KiB (float64: 8), one of the boundaries, 24 bytes a rank, and the slots.
    """
    del thresholds_every, boundaries_every
    if size == 1:
        return Traffic(0, 0, 0)
    k, edges = min(k, numel), [b * numel // size for b in range(size + 1)]
    even, none = [-(-k // size)] * size, [0] * size
    first = oktopk_traffic(rank, 0, dtype, given=none, reached=1, kept=even, edges=edges, boundaries=True, wire=wire)
    moved = wire.block_nbytes(k, numel, dtype) + wire.block_nbytes(k, (size - 1) * numel, dtype)
    nbytes = moved + (size - 1) * SLOT_BYTES
    return together(first, Traffic(nbytes + (3 * size + 1) * wire.overhead, size - 1, 1))


def oktopk_typical(
    rank: int,
    size: int,
    k: int,
    numel: int,
    dtype: torch.dtype,
    *,
    thresholds_every: int = 32,
    boundaries_every: int = 64,
    wire: Wire = PLAIN,
) -> Traffic:
    """A call between two agreements on regions, where these are balanced.

    More than k sums reach a threshold of before: so it is while gradients do not get smaller, because residuals grow.
    """
    del thresholds_every, boundaries_every
    k = min(k, numel)
    even, edges = even_counts(k, size), [b * numel // size for b in range(size + 1)]
    spread: dict[str, Any] = {"given": even, "kept": even, "edges": edges}
    return oktopk_traffic(rank, k, dtype, reached=k + 1, boundaries=False, wire=wire, **spread)


def oktopk_merged(
    rank: int, size: int, k: int, numel: int, *, thresholds_every: int = 32, boundaries_every: int = 64
) -> int:
    """Entries that a rank sums where regions are balanced: its region's share of all ranks'."""
    del rank, size, thresholds_every, boundaries_every
    return min(k, numel)
