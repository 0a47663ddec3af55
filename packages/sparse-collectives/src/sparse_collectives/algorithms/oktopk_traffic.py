"""What Ok-Topk sends: exactly, where it is known what the ranks hold, and at most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from communicators.dense_schedules import largest_power_of_two
from communicators.schedule import SLOT_BYTES
from sparse_compress.vector_format import WIRE_DTYPES

from sparse_collectives.algorithms.even_out import even_counts, is_uneven, shifts
from sparse_collectives.algorithms.kth_largest import kth_largest_sent, sample_count
from sparse_collectives.prediction.traffic import Traffic, bruck_sent, sum_sent, together
from sparse_collectives.wire.wire import PLAIN, Wire

SPAN = 1.5  # measured in training with random gradients, P = 2 … 16: 1.2 to 1.5


def oktopk_traffic(
    rank: int,
    k: int,
    dtype: torch.dtype,
    *,
    given: Sequence[int],
    spans: Sequence[int] | None,
    kept: Sequence[int],
    edges: Sequence[int],
    boundaries: bool,
    wire: Wire = PLAIN,
) -> Traffic:
    """What a rank sends in a call with k ≤ n.

    given: its entries in each region. spans: keys of each rank that may be the k-th largest, as `kth_largest.bracket`
    finds them; None where no more than k sums reach the threshold. kept: entries of each region that are in the total.
    edges: of the regions. boundaries: whether they are agreed on anew.
    """
    size, lengths = len(given), [high - low for low, high in pairwise(edges)]
    sizes = [wire.block_nbytes(entries, length, dtype) for entries, length in zip(given, lengths, strict=True)]
    others = sum(sizes) - sizes[rank]
    parts = [
        Traffic(others + (size - 1) * SLOT_BYTES, size - 1, size - 1),
        kth_largest_sent(rank, k, dtype, spans, size),
        _gather(rank, dtype, kept, edges[-1], wire),
    ]
    if boundaries:
        parts.append(sum_sent(rank, size, 16 * largest_power_of_two(size)))
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
    thresholds_every: int = 1,
    boundaries_every: int = 64,
    wire: Wire = PLAIN,
) -> Traffic:
    """The most that a first call sends; later ones, that agree on no regions, send less.

    Entries: k in the split, k in evening out, (P − 1)·⌈k/P⌉ in the gather, so 6k elements where P divides k. Besides:
    one sum of the boundaries; with S = ⌊√2k⌋ + 1 keys of 4 bytes (float64: 8), (P − 1)·S as samples, and at most P·S
    between two of them, which Bruck hands on ⌈log P⌉ times if they are one rank's; 4 numbers a rank, and the slots.
    """
    del thresholds_every, boundaries_every
    if size == 1:
        return Traffic(0, 0, 0)
    k, edges = min(k, numel), [b * numel // size for b in range(size + 1)]
    even, none = [-(-k // size)] * size, [0] * size
    least: dict[str, Any] = {"given": none, "spans": none, "kept": even, "edges": edges}
    first = oktopk_traffic(rank, k, dtype, boundaries=True, wire=wire, **least)
    between = (size - 1).bit_length() * size * sample_count(k) * WIRE_DTYPES[dtype].itemsize
    moved = wire.block_nbytes(k, numel, dtype) + wire.block_nbytes(k, (size - 1) * numel, dtype)
    nbytes = moved + between + (size - 1) * SLOT_BYTES + (3 * size + 1) * wire.overhead
    return together(first, Traffic(nbytes, size - 1, 1))


def oktopk_typical(
    rank: int,
    size: int,
    k: int,
    numel: int,
    dtype: torch.dtype,
    *,
    thresholds_every: int = 1,
    boundaries_every: int = 64,
    wire: Wire = PLAIN,
) -> Traffic:
    """A call between two agreements on regions, where these are balanced.

    There are more than k sums, as long as ranks do not select the same. All count where the threshold is new, nearly
    all with one of before, while gradients do not get smaller. Samples a gap of g = ⌈k/S⌉ apart leave SPAN·(g − 1)
    keys a rank.
    """
    del thresholds_every, boundaries_every
    k = min(k, numel)
    even, edges = even_counts(k, size), [b * numel // size for b in range(size + 1)]
    spans = [round(SPAN * (-(-k // sample_count(k)) - 1))] * size
    spread: dict[str, Any] = {"given": even, "spans": spans, "kept": even, "edges": edges}
    return oktopk_traffic(rank, k, dtype, boundaries=False, wire=wire, **spread)


def oktopk_merged(
    rank: int, size: int, k: int, numel: int, *, thresholds_every: int = 1, boundaries_every: int = 64
) -> int:
    """Entries that a rank sums where regions are balanced: its region's share of all ranks'."""
    del rank, thresholds_every, boundaries_every
    return min(k, numel) * (size - 1).bit_length()
