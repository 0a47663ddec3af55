"""All ranks' entries on all ranks, by few rounds even where one rank holds most of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from communicators.dense import allgather_blocks
from communicators.schedule import SLOT_BYTES, Round, Schedule, frame
from sparse_compress import SparseVector

from sparse_collectives.entries import body_nbytes, body_of, join_bodies, take


def gather_evenly(mine: SparseVector, counts: Sequence[int], rank: int, size: int) -> Schedule[SparseVector]:
    """The entries of all ranks, whose indices increase from rank to rank.

    counts: of all ranks' entries, known everywhere. Bruck's all-gather hands a rank's own entries on log P times, so
    a rank with more than twice the mean first gives some to the others (see `shifts`).
    """
    body = body_of(mine)
    if is_uneven(counts):
        runs = shifts(counts, rank)
        sends = {to: frame(body_of(take(mine, [run]))) for to, run in runs.items() if to != rank}
        sources = {other: shifts(counts, other).get(rank) for other in range(size) if other != rank}
        recvs = {other: run.stop - run.start for other, run in sources.items() if run is not None}
        received = {}
        if sends or recvs:
            capacities = {other: SLOT_BYTES + body_nbytes(count, mine.dtype) for other, count in recvs.items()}
            received = yield Round(sends, capacities)
        bodies = {other: payload[SLOT_BYTES:] for other, payload in received.items()}
        bodies[rank] = body_of(take(mine, [runs.get(rank, slice(0, 0))]))
        body = body_of(join_bodies([bodies[other] for other in sorted(bodies)], like=mine))
        counts = even_counts(sum(counts), size)
    nbytes = [body_nbytes(count, mine.dtype) for count in counts]
    return join_bodies((yield from allgather_blocks(body, nbytes, rank, size)), like=mine)


def is_uneven(counts: Sequence[int]) -> bool:
    """Whether one rank has more than twice the mean. (The paper: four times; two is what keeps 6k elements a bound.)"""
    return max(counts) * len(counts) > 2 * sum(counts)


def even_counts(total: int, size: int) -> list[int]:
    """Entries that each rank has afterwards."""
    return [(rank + 1) * total // size - rank * total // size for rank in range(size)]


def shifts(counts: Sequence[int], rank: int) -> dict[int, slice]:
    """Which of its entries a rank gives to whom, itself included, so that all have about as many, in the same order."""
    begin, end = list(pairwise(accumulate(counts, initial=0)))[rank]
    edges = pairwise(accumulate(even_counts(sum(counts), len(counts)), initial=0))
    runs = {to: slice(max(low, begin) - begin, min(high, end) - begin) for to, (low, high) in enumerate(edges)}
    return {to: run for to, run in runs.items() if run.start < run.stop}
