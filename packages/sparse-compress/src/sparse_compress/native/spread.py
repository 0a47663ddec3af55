"""Search of the k-th largest of keys spread over ranks, by the kernels; see kth_largest.py of sparse-collectives."""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from sparse_compress.native.library import SCRATCH, kernels
from sparse_compress.native.sparse import SLACK


def bracket(rows: Tensor, ranks: int, k: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Brackets the k-th largest by two keys; [first, last) of each rank's keys, the largest first, may hold it.

    rows: int32, for every rank the number of its keys, and as many samples of them as of any other's.
    """
    ends, spans = (c_int64 * 2)(), (c_int64 * (2 * ranks))()
    kernels().sc_bracket(rows.data_ptr(), ranks, len(rows) // ranks - 1, k, ends, spans)
    low, high = ends
    return low, high, list(zip(spans[::2], spans[1::2], strict=True))


def said(in_order: Tensor, low: int, high: int, span: tuple[int, int]) -> Tensor:
    """Counts of keys, int32, the smallest first, larger than high, equal to it, equal to low; then the span's keys."""
    first, last = span
    numbers = torch.empty(3 + last - first, dtype=torch.int32)
    kernels().sc_say(in_order.data_ptr(), len(in_order), low, high, first, last, numbers.data_ptr())
    return numbers


def settle(rows: Tensor, lengths: Sequence[int], low: int, high: int, k: int) -> tuple[int, list[int], list[int]]:
    """Finds the k-th largest key, and how many keys of every rank are larger than it, and how many equal it.

    rows: int32, for every rank the numbers of keys larger than high, equal to it, and equal to low; then its keys.
    """
    ranks = len(lengths)
    larger, equal = (c_int64 * ranks)(), (c_int64 * ranks)()
    scratch = SCRATCH.of(8 * (len(rows) + SLACK))
    sizes = (c_int64 * ranks)(*lengths)
    key = kernels().sc_settle(rows.data_ptr(), sizes, ranks, low, high, k, larger, equal, scratch)
    SCRATCH.trim()
    return key, list(larger), list(equal)
