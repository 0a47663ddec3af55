"""The k-th largest of numbers that are spread over ranks: samples enclose it, and what lies between is gathered."""

from collections.abc import Sequence
from itertools import accumulate
from math import isqrt

import torch
from communicators import Schedule, schedules
from sparse_compress import spread_keys
from torch import Tensor

from sparse_collectives.algorithm import Traffic
from sparse_collectives.wire import InvalidMessageError


def kth_largest(
    keys: Tensor, least: int, k: int, rank: int, size: int, *, most: int
) -> Schedule[spread_keys.KthLargest]:
    """The k-th largest of all ranks' keys from `least` on, the same on every rank; -1 where they are no more than k.

        1. all-gather   of the number m of a rank's keys and every g-th of them, g = ⌈m/S⌉, S = ⌊√2k⌋ + 1
           bracket      every sample stands for g keys, g − 1 more may be as large: two samples enclose the k-th
        2. all-gather   of the keys between the two, and how many lie above

    Selection by regular samples (as in Shi & Schaeffer's sort, JPDC 1992), 2⌈log P⌉ rounds. Less than 2M/S of the M
    keys are gathered whatever they are, so S balances the two: 4(P − 1)·(S + 2k/S) bytes where M = k·P, evenly spread.

    keys: 1-D int32 or int64, not negative, this rank's; k ≥ 1. most: keys that all ranks can have together, agreed:
    what they say is held against it before anything is made room for. InvalidMessageError where it cannot be.
    """
    in_order = spread_keys.rising(keys, least)
    m, samples = len(in_order), sample_count(k)
    gap = spread_keys.gap_of(m, samples)
    mine = in_order.new_zeros(1 + samples)
    mine[0], mine[1 : 1 + m // gap] = m, in_order[m % gap :: gap]
    sampled = yield from _gathered(mine, [len(mine)] * size, rank, size)
    counts: list[int] = sampled[:: len(mine)].tolist()
    _check_counts(counts, most)
    if sum(counts) <= k:
        return spread_keys.KthLargest(-1, counts, [0] * size)
    low, high, spans = spread_keys.bracket(sampled, counts, k)
    mine, lengths = spread_keys.counted(in_order, low, high, spans[rank]), [3 + last - first for first, last in spans]
    gathered = yield from _gathered(mine, lengths, rank, size)
    found = spread_keys.find(gathered, lengths, low, high, k)
    _check_found(found, counts, k)
    return found


def sample_count(k: int) -> int:
    """S: keys that each rank gives as samples."""
    return isqrt(2 * k) + 1


def kth_largest_sent(rank: int, k: int, dtype: torch.dtype, spans: Sequence[int] | None, size: int) -> Traffic:
    """Bruck's share of P times 1 + S keys, as wide as the values; then of 3 + what each rank's span has, if any do."""
    width = torch.promote_types(dtype, torch.float32).itemsize
    sampled = Traffic.allgather([width * (1 + sample_count(k))] * size, rank)
    if spans is None:
        return sampled
    return Traffic.total(sampled, Traffic.allgather([width * (3 + span) for span in spans], rank))


def _check_counts(counts: Sequence[int], most: int) -> None:
    for source, (count, so_far) in enumerate(zip(counts, accumulate(counts), strict=True)):
        if count < 0 or so_far > most:
            raise InvalidMessageError(source, f"{count} keys, expected 0 or more, and {most} of all ranks at most")


def _check_found(found: spread_keys.KthLargest, counts: Sequence[int], k: int) -> None:
    for source, (larger, equal, count) in enumerate(zip(found.larger, found.equal, counts, strict=True)):
        if larger < 0 or equal < 0 or larger + equal > count:
            raise InvalidMessageError(source, f"{larger} larger and {equal} equal keys of {count}")
    larger, equal = sum(found.larger), sum(found.equal)
    if not larger < k <= larger + equal:
        raise InvalidMessageError(None, f"{larger} keys are larger than the {k}-th largest, and {equal} equal it")


def _gathered(mine: Tensor, lengths: Sequence[int], rank: int, size: int) -> Schedule[Tensor]:
    """All ranks' numbers, `lengths` of them, in rank order, on the CPU."""
    nbytes = [length * mine.dtype.itemsize for length in lengths]
    blocks = yield from schedules.allgather_blocks(mine.view(torch.uint8), nbytes, rank, size)
    return torch.cat(blocks).view(mine.dtype).cpu()  # one copy from the device
