"""The k-th largest of keys that are spread over ranks, by the kernels; see kth_largest.py of sparse-collectives."""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from sparse_compress.native.library import SCRATCH, kernels
from sparse_compress.native.sparse import SLACK


def bracket(rows: Tensor, ranks: int, k: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Two keys that enclose the k-th largest, and which of each rank's may be it, the largest first, as [first, last).

    rows: int32, of every rank how many keys it has, and as many samples of them as of any other.
    """
    ends, spans = (c_int64 * 2)(), (c_int64 * (2 * ranks))()
    kernels().sc_bracket(rows.data_ptr(), ranks, len(rows) // ranks - 1, k, ends, spans)
    low, high = ends
    return low, high, list(zip(spans[::2], spans[1::2], strict=True))


def said(in_order: Tensor, low: int, high: int, span: tuple[int, int]) -> Tensor:
    """How many keys, int32, the smallest first, are larger than high, equal it, equal low; then those of the span."""
    first, last = span
    numbers = torch.empty(3 + last - first, dtype=torch.int32)
    kernels().sc_say(in_order.data_ptr(), len(in_order), low, high, first, last, numbers.data_ptr())
    return numbers


def settle(rows: Tensor, lengths: Sequence[int], low: int, high: int, k: int) -> tuple[int, list[int], list[int]]:
    """The k-th largest key, and how many keys of every rank are larger, and equal it.

    rows: int32, so many numbers of every rank: how many keys are larger than high, equal it, and equal low; then keys.
    """
    ranks = len(lengths)
    larger, equal = (c_int64 * ranks)(), (c_int64 * ranks)()
    scratch = SCRATCH.of(8 * (len(rows) + SLACK))
    sizes = (c_int64 * ranks)(*lengths)
    key = kernels().sc_settle(rows.data_ptr(), sizes, ranks, low, high, k, larger, equal, scratch)
    SCRATCH.trim()
    return key, list(larger), list(equal)
