"""All ranks' entries on all ranks, by few rounds even where one rank holds most of them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from communicators import Payload, Round, Schedule, schedules
from sparse_compress import SparseVector, add, vectors

from sparse_collectives.algorithm import Reduction, Traffic
from sparse_collectives.wire import RAW, Wire, blame_rank, join_in_order, joined


def gather_evenly(
    mine: SparseVector, counts: Sequence[int], rank: int, size: int, wire: Wire = RAW
) -> Schedule[Reduction]:
    """The entries of all ranks, whose indices increase from rank to rank; dropped: what the wire has rounded off here.

    counts: of all ranks. Bruck's all-gather hands a rank's own entries on log P times, so a rank with more than twice
    the mean first gives some to the others (see `shifts`).
    """
    mine, dropped = wire.rounded(mine)
    if is_uneven(counts):
        mine, rest = wire.rounded((yield from _even_out(mine, counts, rank, size, wire)))  # int8 scales may differ
        dropped, counts = add(dropped, rest), even_counts(sum(counts), size)
    nbytes = [wire.block_nbytes(count, mine.numel, mine.dtype) for count in counts]
    spans = [(0, mine.numel)] * size
    blocks = yield from schedules.allgather_blocks(wire.block(mine, spans[rank]), nbytes, rank, size)
    return Reduction(joined(wire, blocks, spans, counts, mine, range(size)), dropped)


def _even_out(mine: SparseVector, counts: Sequence[int], rank: int, size: int, wire: Wire) -> Schedule[SparseVector]:
    """This rank's share of all entries, in one round."""
    runs, span = shifts(counts, rank), (0, mine.numel)
    sources = {other: shifts(counts, other).get(rank) for other in range(size) if other != rank}
    coming = {other: run.stop - run.start for other, run in sources.items() if run is not None}
    sends = {to: Payload.of(wire.block(vectors.take(mine, [run]), span)) for to, run in runs.items() if to != rank}
    recvs = {other: wire.block_nbytes(n, mine.numel, mine.dtype) for other, n in coming.items()}
    received = (yield Round(sends, recvs)) if sends or recvs else {}
    parts = {rank: vectors.take(mine, [runs.get(rank, slice(0, 0))])}
    for other, payload in received.items():
        with blame_rank(other):
            parts[other] = wire.entries(payload.body, span, mine, coming[other])
    return join_in_order([(other, parts[other]) for other in sorted(parts)])


def is_uneven(counts: Sequence[int]) -> bool:
    """Whether one rank has more than twice the mean.

    The paper has four times; two is what keeps 6k elements a bound.
    """
    return max(counts) * len(counts) > 2 * sum(counts)


def even_counts(total: int, size: int) -> list[int]:
    """Entries that each rank has afterwards."""
    return [high - low for low, high in schedules.block_bounds(total, size)]


def shifts(counts: Sequence[int], rank: int) -> dict[int, slice]:
    """Entries that this rank gives to each, itself included, so that all have about as many, in the same order."""
    begin, end = list(pairwise(accumulate(counts, initial=0)))[rank]
    spans = schedules.block_bounds(sum(counts), len(counts))
    runs = {to: slice(max(low, begin) - begin, min(high, end) - begin) for to, (low, high) in enumerate(spans)}
    return {to: run for to, run in runs.items() if run.start < run.stop}


def gather_evenly_sent(rank: int, dtype: torch.dtype, counts: Sequence[int], numel: int, wire: Wire) -> Traffic:
    """Traffic of `gather_evenly`: evening out, where it is needed, in one round; then Bruck."""
    moved = Traffic(0, 0, 0)
    if is_uneven(counts):
        runs, even = shifts(counts, rank), even_counts(sum(counts), len(counts))
        kept = runs.pop(rank, slice(0, 0))
        gives = [run.stop - run.start for run in runs.values()]
        takes = even[rank] > kept.stop - kept.start
        nbytes = sum(wire.block_nbytes(entries, numel, dtype) for entries in gives)
        moved = Traffic.of_bodies(nbytes, len(gives), int(takes or bool(gives)))
        counts = even
    return Traffic.total(moved, Traffic.allgather([wire.block_nbytes(n, numel, dtype) for n in counts], rank))
