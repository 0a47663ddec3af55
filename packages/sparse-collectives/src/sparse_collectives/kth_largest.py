"""The k-th largest of numbers that are spread over ranks, without gathering them: radix select by summed histograms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from communicators.dense import halving_doubling_allreduce, largest_power_of_two
from communicators.schedule import SLOT_BYTES, Schedule
from torch import Tensor

from sparse_collectives.traffic import Traffic

DIGIT_BITS = 8  # a histogram of 1 KiB: small beside the entries, and four sums for float32


class KthLargest(NamedTuple):
    """key: the k-th largest. ties: of those that equal it, how many belong to the k largest."""

    key: int
    ties: int


def kth_largest(keys: Tensor, k: int, rank: int, size: int) -> Schedule[KthLargest]:
    """The k-th largest of all ranks' keys, 1 ≤ k ≤ how many they are, the same on every rank.

    keys: 1-D int32 or int64, not negative, this rank's. Fixes the key digit by digit from the top: each sum counts the
    next digit among the keys that agree with what is known so far.
    """
    key, high = 0, torch.iinfo(keys.dtype).bits - 1
    while high:
        low = max(0, high - DIGIT_BITS)
        digits = (keys >> low) & ((1 << (high - low)) - 1)
        counts = torch.bincount(digits, minlength=_bins(size)).int()
        total = (yield from halving_doubling_allreduce(counts, rank, size)).long()
        at_or_above = total.flip(0).cumsum(0).flip(0)
        digit = int((at_or_above >= k).sum()) - 1  # the largest digit that k still reaches
        k -= int(at_or_above[digit] - total[digit])
        keys = keys[digits == digit]
        key, high = key | digit << low, low
    return KthLargest(key, k)


def kth_largest_sent(rank: int, size: int, dtype: torch.dtype) -> Traffic:
    """One sum of a histogram for each digit of the values' dtype: 4 for float32, 8 for float64."""
    digits = -(-(dtype.itemsize * 8 - 1) // DIGIT_BITS)
    return Traffic(*(digits * part for part in sum_sent(rank, size, 4 * _bins(size))))


def sum_sent(rank: int, size: int, nbytes: int) -> Traffic:
    """A halving-doubling sum of so many bytes, split evenly among Q, the largest power of two in P.

    2·(Q − 1)/Q of the bytes in 2 log Q messages; all of them once more from a rank with a folded partner, whose own
    message is its only one.
    """
    group = largest_power_of_two(size)
    if rank >= group:
        return Traffic(nbytes + SLOT_BYTES, 1, 2)
    levels, has_partner = group.bit_length() - 1, rank + group < size
    messages = 2 * levels + has_partner
    sent = 2 * (nbytes - nbytes // group) + has_partner * nbytes
    return Traffic(sent + messages * SLOT_BYTES, messages, 2 * levels + 2 * has_partner)


def _bins(size: int) -> int:
    """As many as digits, or as ranks that the sum splits them among."""
    return max(1 << DIGIT_BITS, largest_power_of_two(size))
