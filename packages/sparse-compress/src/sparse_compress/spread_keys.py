"""The k-th largest of integer keys that are spread over ranks: what each rank computes between the two gathers.

For algorithms with a threshold over all ranks: ``from sparse_compress import spread_keys``. Samples bracket the k-th
largest; every rank gives its keys between, and how many lie above. On a CPU kernels take int32; NumPy is their
reference.
"""

from collections.abc import Sequence
from ctypes import c_int64
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_compress.native.library import SCRATCH, SLACK, kernels

Keys = NDArray[np.signedinteger[Any]]
INT32 = (torch.int32,)


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


def rising(keys: Tensor, least: int) -> Tensor:
    """Keys that are ``least`` or larger, the smallest first.

    Args:
        keys: int32 or int64, 1-D, not negative; any device.
        least: Smallest key that counts.
    """
    if library := kernels(keys, INT32):
        room = len(keys) + SLACK
        in_order, scratch = torch.empty(room, dtype=torch.int32, device="cpu"), SCRATCH.of(4 * room)
        count = library.sc_sorted(keys.data_ptr(), len(keys), least, in_order.data_ptr(), scratch.data_ptr())
        return in_order[:count]
    in_order = torch.sort(keys).values
    return in_order[torch.searchsorted(in_order, least) :]


def gap_of(count: int, samples: int) -> int:
    """Keys that one of a rank's samples stands for.

    Args:
        count: Number of the rank's keys.
        samples: Number of its samples.
    """
    return max(-(-count // samples), 1)


def bracket(rows: Tensor, counts: Sequence[int], k: int) -> Bracket:
    """Brackets the k-th largest among all ranks' keys, every g-th of which is a sample.

    Let L(v) count the keys that samples of at least v stand for. L(v) ≤ keys ≥ v ≤ L(v) + Σ (g − 1). So the largest
    sample with L ≥ k is not above the k-th key, and the first with L ≥ k − Σ (g − 1) not below it.

    Args:
        rows: On the CPU; of every rank the number of its keys, and as many samples as of any other's.
        counts: Those numbers.
        k: 1 … Σ counts − 1.
    """
    if library := kernels(rows, INT32):
        ranks, ends, spans = len(counts), (c_int64 * 2)(), (c_int64 * (2 * len(counts)))()
        library.sc_bracket(rows.data_ptr(), ranks, len(rows) // ranks - 1, k, ends, spans)
        return Bracket(ends[0], ends[1], list(zip(spans[::2], spans[1::2], strict=True)))
    samples = rows.numpy().reshape(len(counts), -1)[:, 1:]
    gaps = [gap_of(count, len(own)) for count, own in zip(counts, samples, strict=True)]
    taken: list[Keys] = [own[: count // gap] for count, gap, own in zip(counts, gaps, samples, strict=True)]
    values = np.concatenate(taken)
    order = np.argsort(-values, kind="stable")
    reached = np.repeat(gaps, [len(own) for own in taken])[order].cumsum()
    at_low, at_high = np.searchsorted(reached, [k, k - sum(gaps) + len(gaps)])
    low = int(values[order[at_low]]) if at_low < len(values) else -1
    high = int(values[order[at_high]]) if k > sum(gaps) - len(gaps) else int(np.iinfo(values.dtype).max)
    found = []
    for count, gap, own in zip(counts, gaps, taken, strict=True):
        first = int(np.count_nonzero(own >= high)) * gap
        last = min(int(np.count_nonzero(own > low)) * gap + gap - 1, count)
        found.append((first, max(first, last)))
    return Bracket(low, high, found)


def counted(in_order: Tensor, low: int, high: int, span: tuple[int, int]) -> Tensor:
    """Numbers of own keys that are larger than high, equal it, and equal low; then the keys of the span.

    Args:
        in_order: Keys, the smallest first.
        low: Lower end of the bracket.
        high: Upper end.
        span: [first, last) of the keys, the largest first.
    """
    m, (first, last) = len(in_order), span
    if library := kernels(in_order, INT32):
        numbers = torch.empty(3 + last - first, dtype=torch.int32, device="cpu")
        library.sc_say(in_order.data_ptr(), m, low, high, first, last, numbers.data_ptr())
        return numbers
    ends = in_order.new_tensor([low, high])
    below, upto = torch.searchsorted(in_order, ends), torch.searchsorted(in_order, ends, right=True)
    return torch.cat([m - upto[1:], (upto - below).flip(0), in_order[m - last : m - first]]).to(in_order.dtype)


def find(rows: Tensor, lengths: Sequence[int], low: int, high: int, k: int) -> KthLargest:
    """Finds the k-th largest: high, between the two, or low.

    Args:
        rows: On the CPU; of every rank what `counted` gave.
        lengths: Lengths of those.
        low: Lower end of the bracket.
        high: Upper end.
        k: As in `bracket`.
    """
    if library := kernels(rows, INT32):
        ranks = len(lengths)
        larger, equal = (c_int64 * ranks)(), (c_int64 * ranks)()
        scratch = SCRATCH.of(8 * (len(rows) + SLACK))
        sizes = (c_int64 * ranks)(*lengths)
        key = library.sc_settle(rows.data_ptr(), sizes, ranks, low, high, k, larger, equal, scratch.data_ptr())
        return KthLargest(key, list(larger), list(equal))
    gathered = np.split(rows.numpy().astype(np.int64), list(accumulate(lengths[:-1])))
    above, at_high, at_low = np.array([numbers[:3] for numbers in gathered]).T
    between = [numbers[3:][(numbers[3:] > low) & (numbers[3:] < high)] for numbers in gathered]
    wanted, inside = k - int(above.sum() + at_high.sum()), np.concatenate(between)
    key = high if wanted <= 0 else low
    if 0 < wanted <= len(inside):
        key = int(np.partition(inside, len(inside) - wanted)[len(inside) - wanted])
    larger = above + at_high * (key < high) + [np.count_nonzero(own > key) for own in between]
    tied = at_high if key == high else at_low * (key == low)
    equal = tied + [np.count_nonzero(own == key) for own in between]
    return KthLargest(key, larger.tolist(), equal.tolist())
