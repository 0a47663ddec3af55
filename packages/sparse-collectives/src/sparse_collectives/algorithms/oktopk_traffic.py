"""Traffic of Ok-Topk: exact where the ranks' entries are known, and its upper bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from communicators import schedules

from sparse_collectives.algorithms.even_out import even_counts, is_uneven, shifts
from sparse_collectives.algorithms.kth_largest import kth_largest_sent
from sparse_collectives.traffic import Traffic
from sparse_collectives.wire import RAW, Wire

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
    wire: Wire = RAW,
) -> Traffic:
    """Traffic of a rank in a call with k ≤ n.

    given: its entries in each region. spans: keys of each rank that may be the k-th largest, as `kth_largest.bracket`
    finds them; None if at most k sums reach the threshold. kept: entries of each region that are in the total. edges:
    edges of the regions. boundaries: whether the ranks agree on new ones in this call.
    """
    size, lengths = len(given), [high - low for low, high in pairwise(edges)]
    sizes = [wire.block_nbytes(entries, length, dtype) for entries, length in zip(given, lengths, strict=True)]
    others = sum(sizes) - sizes[rank]
    parts = [
        Traffic.of_bodies(others, size - 1, size - 1),
        kth_largest_sent(rank, k, dtype, spans, size),
        _gather(rank, dtype, kept, edges[-1], wire),
    ]
    if boundaries:
        parts.append(Traffic.allreduce(16 * schedules.largest_power_of_two(size), rank, size))
    return Traffic.total(*parts)


def _gather(rank: int, dtype: torch.dtype, counts: Sequence[int], numel: int, wire: Wire) -> Traffic:
    """Evening out, where it is needed, in one round; then Bruck."""
    moved = Traffic(0, 0, 0)
    if is_uneven(counts):
        gives = [run.stop - run.start for to, run in shifts(counts, rank).items() if to != rank]
        takes = any(rank in shifts(counts, other) for other in range(len(counts)) if other != rank)
        nbytes = sum(wire.block_nbytes(entries, numel, dtype) for entries in gives)
        moved = Traffic.of_bodies(nbytes, len(gives), int(takes or bool(gives)))
        counts = even_counts(sum(counts), len(counts))
    gathered = Traffic.allgather([wire.block_nbytes(entries, numel, dtype) for entries in counts], rank)
    return Traffic.total(moved, gathered)
