"""The k-th largest of numbers that are spread over ranks: samples enclose it, and what lies between is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from communicators import Schedule, schedules
from numpy.typing import NDArray
from sparse_compress.entries import rising
from sparse_compress.native import spread
from sparse_compress.native.library import ready
from sparse_compress.vector_format import WIRE_DTYPES
from torch import Tensor

from sparse_collectives.traffic import Traffic, bruck_sent, together
from sparse_collectives.wire.invalid import InvalidMessageError

Keys = NDArray[np.signedinteger[Any]]


class KthLargest(NamedTuple):
    """The k-th largest key. larger, equal: numbers of each rank's keys that are larger, and that equal it."""

    key: int
    larger: list[int]
    equal: list[int]


class Bracket(NamedTuple):
    """Keys low and high that enclose the k-th largest. spans: [first, last) of each rank's keys, the largest first.

    Outside its span no key of a rank lies strictly between low and high.
    """

    low: int
    high: int
    spans: list[tuple[int, int]]


def kth_largest(keys: Tensor, least: int, k: int, rank: int, size: int, *, most: int) -> Schedule[KthLargest]:
    """The k-th largest of all ranks' keys from `least` on, the same on every rank; -1 where they are no more than k.

        1. all-gather   of the number m of a rank's keys and every g-th of them, g = ⌈m/S⌉, S = ⌊√2k⌋ + 1
           bracket      every sample stands for g keys, g − 1 more may be as large: two samples enclose the k-th
        2. all-gather   of the keys between the two, and how many lie above

    Selection by regular samples (as in Shi & Schaeffer's sort, JPDC 1992), 2⌈log P⌉ rounds. Less than 2M/S of the M
    keys are gathered whatever they are, so S balances the two: 4(P − 1)·(S + 2k/S) bytes where M = k·P, evenly spread.

    keys: 1-D int32 or int64, not negative, this rank's; k ≥ 1. most: keys that all ranks can have together, agreed:
    what they say is held against it before anything is made room for. InvalidMessageError where it cannot be.
    """
    in_order = rising(keys, least)
    m, samples = len(in_order), sample_count(k)
    gap = _gap(m, samples)
    mine = in_order.new_zeros(1 + samples)
    mine[0], mine[1 : 1 + m // gap] = m, in_order[m % gap :: gap]
    sampled = yield from _gathered(mine, [len(mine)] * size, rank, size)
    counts: list[int] = sampled[:: len(mine)].tolist()
    _check_counts(counts, most)
    if sum(counts) <= k:
        return KthLargest(-1, counts, [0] * size)
    low, high, spans = _enclosed(sampled, counts, k)
    mine, lengths = _said(in_order, low, high, spans[rank]), [3 + last - first for first, last in spans]
    gathered = yield from _gathered(mine, lengths, rank, size)
    found = _settled(gathered, lengths, low, high, k)
    _check_found(found, counts, k)
    return found


def _enclosed(sampled: Tensor, counts: Sequence[int], k: int) -> Bracket:
    """Result of `bracket` for all ranks' counts and samples."""
    if sampled.dtype == torch.int32 and ready(sampled):
        return Bracket(*spread.bracket(sampled, len(counts), k))
    return bracket(counts, list(sampled.numpy().reshape(len(counts), -1)[:, 1:]), k)


def _said(in_order: Tensor, low: int, high: int, span: tuple[int, int]) -> Tensor:
    """Numbers of own keys that are larger than high, equal it, and equal low; then the keys of the span."""
    if in_order.dtype == torch.int32 and ready(in_order):
        return spread.said(in_order, low, high, span)
    m, (first, last) = len(in_order), span
    ends = in_order.new_tensor([low, high])
    below, upto = torch.searchsorted(in_order, ends), torch.searchsorted(in_order, ends, right=True)
    return torch.cat([m - upto[1:], (upto - below).flip(0), in_order[m - last : m - first]]).to(in_order.dtype)


def _settled(gathered: Tensor, lengths: Sequence[int], low: int, high: int, k: int) -> KthLargest:
    """Result of `settle` for all ranks' keys between low and high."""
    if gathered.dtype == torch.int32 and ready(gathered):
        return KthLargest(*spread.settle(gathered, lengths, low, high, k))
    return settle(np.split(gathered.numpy(), list(accumulate(lengths[:-1]))), low, high, k)


def bracket(counts: Sequence[int], samples: Sequence[Keys], k: int) -> Bracket:
    """Bracket of the k-th largest among `counts` keys of each rank, every g-th of which is a sample; k < Σ counts.

    Let L(v) count the keys that samples of at least v stand for. L(v) ≤ keys ≥ v ≤ L(v) + Σ (g − 1). So the largest
    sample with L ≥ k is not above the k-th key, and the first with L ≥ k − Σ (g − 1) not below it.
    """
    gaps = [_gap(count, len(own)) for count, own in zip(counts, samples, strict=True)]
    taken = [own[: count // gap] for count, gap, own in zip(counts, gaps, samples, strict=True)]
    values = np.concatenate(taken)
    order = np.argsort(-values, kind="stable")
    reached = np.repeat(gaps, [len(own) for own in taken])[order].cumsum()
    at_low, at_high = np.searchsorted(reached, [k, k - sum(gaps) + len(gaps)])
    low = int(values[order[at_low]]) if at_low < len(values) else -1
    high = int(values[order[at_high]]) if k > sum(gaps) - len(gaps) else int(np.iinfo(values.dtype).max)
    spans = []
    for count, gap, own in zip(counts, gaps, taken, strict=True):
        first = int(np.count_nonzero(own >= high)) * gap
        last = min(int(np.count_nonzero(own > low)) * gap + gap - 1, count)
        spans.append((first, max(first, last)))
    return Bracket(low, high, spans)


def sample_count(k: int) -> int:
    """S: keys that each rank gives as samples."""
    return isqrt(2 * k) + 1


def kth_largest_sent(rank: int, k: int, dtype: torch.dtype, spans: Sequence[int] | None, size: int) -> Traffic:
    """Bruck's share of P times 1 + S keys, as wide as the values; then of 3 + what each rank's span has, if any do."""
    sampled = bruck_sent([WIRE_DTYPES[dtype].itemsize * (1 + sample_count(k))] * size, rank)
    if spans is None:
        return sampled
    return together(sampled, bruck_sent([WIRE_DTYPES[dtype].itemsize * (3 + span) for span in spans], rank))


def settle(gathered: Sequence[Keys], low: int, high: int, k: int) -> KthLargest:
    """The k-th largest is high, between the two, or low.

    gathered: of every rank how many of its keys are larger than high, equal it, and equal low; then keys.
    """
    above, at_high, at_low = ([int(numbers[i]) for numbers in gathered] for i in range(3))
    between = [numbers[3:][(numbers[3:] > low) & (numbers[3:] < high)] for numbers in gathered]
    from_high = [more + equal for more, equal in zip(above, at_high, strict=True)]
    wanted, inside = k - sum(from_high), np.concatenate(between)
    if wanted <= 0:
        return KthLargest(high, above, at_high)
    if wanted > len(inside):
        return KthLargest(low, [more + len(own) for more, own in zip(from_high, between, strict=True)], at_low)
    key = int(np.partition(inside, len(inside) - wanted)[len(inside) - wanted])
    larger = [more + int(np.count_nonzero(own > key)) for more, own in zip(from_high, between, strict=True)]
    return KthLargest(key, larger, [int(np.count_nonzero(own == key)) for own in between])


def _check_counts(counts: Sequence[int], most: int) -> None:
    for source, so_far in enumerate(accumulate(counts)):
        if counts[source] < 0 or so_far > most:
            raise InvalidMessageError(
                source, f"{counts[source]} keys, expected 0 or more, and {most} of all ranks at most"
            )


def _check_found(found: KthLargest, counts: Sequence[int], k: int) -> None:
    for source, (larger, equal, count) in enumerate(zip(found.larger, found.equal, counts, strict=True)):
        if larger < 0 or equal < 0 or larger + equal > count:
            raise InvalidMessageError(source, f"{larger} larger and {equal} equal keys of {count}")
    larger, equal = sum(found.larger), sum(found.equal)
    if not larger < k <= larger + equal:
        raise InvalidMessageError(None, f"{larger} keys are larger than the {k}-th largest, and {equal} equal it")


def _gap(count: int, samples: int) -> int:
    return max(-(-count // samples), 1)


def _gathered(mine: Tensor, lengths: Sequence[int], rank: int, size: int) -> Schedule[Tensor]:
    """All ranks' numbers, `lengths` of them, in rank order, on the CPU."""
    nbytes = [length * mine.dtype.itemsize for length in lengths]
    blocks = yield from schedules.allgather_blocks(mine.view(torch.uint8), nbytes, rank, size)
    return torch.cat(blocks).view(mine.dtype).cpu()  # one copy from the device
