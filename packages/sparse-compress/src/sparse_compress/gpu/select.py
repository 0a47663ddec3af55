# mypy: disable-error-code="no-untyped-call"
# (Triton's kernels are not typed.)
"""Launches: top-k, and the fused step of error feedback (see the package's docstring for the algorithm)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.gpu.accumulate import accumulate, find_maxima
from sparse_compress.gpu.compact import count_lines, count_selected, list_lines, write_selected
from sparse_compress.gpu.lines import LINE
from sparse_compress.gpu.radix import BINS, count_digits, pick_digit
from sparse_compress.vector import SparseVector

WARPS = 4
WRITE_WARPS = 8  # of write_selected, which keeps more per element in registers
UPPER_DIGITS = ((23, 8), (15, 8))  # (lowest bit, bits) of a key's digits: enough for a bound
DIGITS = {
    torch.int32: UPPER_DIGITS,
    torch.float32: (*UPPER_DIGITS, (7, 8), (0, 7)),
    torch.bfloat16: ((23, 8), (16, 7)),
    torch.float16: ((23, 8), (16, 7)),
}


class Tiling(NamedTuple):
    """Division of the work among the kernels' programs."""

    block: int = 2048  # elements at a time
    programs: int = 1024  # at most, of the kernels whose programs take several blocks: some 8 a multiprocessor


TILING = Tiling()


class Lines(NamedTuple):
    """Lines that reach a bound."""

    listed: Tensor  # int32: their numbers, in order
    total: Tensor  # int32, (1,): how many they are


def topk(x: Tensor, k: int, *, tiling: Tiling = TILING) -> SparseVector:
    """``sparse_compress.topk`` of a contiguous 1-D tensor of 16 or 32 bits, 0 < k ≤ n; no host synchronisation."""
    maxima = _line_maxima_of(x)
    find_maxima[_blocks(x, tiling),](x, maxima, len(x), BLOCK=tiling.block, num_warps=WARPS)
    return _take_largest(x, maxima, k, tiling)


def step_topk(
    before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator, *, tiling: Tiling = TILING
) -> SparseVector:
    """``Largest.step`` for a contiguous gradient of 16 or 32 bits, 0 < k ≤ n; no host synchronisation.

    Sums are the same bits as on a CPU, but for the payload of NaNs.
    """
    residual = out.residual.view(-1)
    maxima = _line_maxima_of(residual)
    velocity, new_velocity = (residual if part.velocity is None else part.velocity for part in (before, out))
    accumulate[_blocks(residual, tiling),](
        gradient, before.residual, residual, velocity, new_velocity, maxima, momentum, len(residual),
        MOMENTUM=out.velocity is not None, BLOCK=tiling.block, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return _take_largest(residual, maxima, k, tiling, clear=out)


def _take_largest(x: Tensor, maxima: Tensor, k: int, tiling: Tiling, clear: Accumulator | None = None) -> SparseVector:
    lines = _lines_with_largest(maxima, k, tiling)
    state = _kth_largest(x, lines, k, tiling)
    blocks = _blocks(x, tiling)
    programs = min(blocks, tiling.programs)
    counts = torch.empty(blocks, dtype=torch.int64, device=x.device)
    count_selected[programs,](x, *lines, state, counts, len(x), blocks, BLOCK=tiling.block, num_warps=WARPS)
    counts = counts.cumsum(0)
    sent = SparseVector.allocate(k, len(x), torch.float32, x.device)
    velocity = None if clear is None else clear.velocity
    write_selected[programs,](
        x, x if velocity is None else velocity, *lines, state, counts, sent.indices, sent.values, len(x),
        CLEAR=clear is not None, MOMENTUM=velocity is not None, BLOCK=tiling.block, num_warps=WRITE_WARPS,
    )  # fmt: skip
    return sent


def _lines_with_largest(maxima: Tensor, k: int, tiling: Tiling) -> Lines:
    """Lines that hold the k largest elements, and few others: those whose maximum reaches the k-th largest one's."""
    bound = _kth_largest(maxima, None, min(k, len(maxima)), tiling)
    blocks, sizes = _blocks(maxima, tiling), {"BLOCK": tiling.block, "num_warps": WARPS}
    counts = torch.empty(blocks, dtype=torch.int32, device=maxima.device)
    count_lines[blocks,](maxima, bound, counts, len(maxima), **sizes)
    counts = counts.cumsum(0, dtype=torch.int32)
    listed = torch.empty_like(maxima)
    list_lines[blocks,](maxima, bound, counts, listed, len(maxima), **sizes)
    return Lines(listed, counts[-1:])


def _kth_largest(x: Tensor, lines: Lines | None, k: int, tiling: Tiling) -> Tensor:
    """int32, (2,): the k-th largest key of ``x``, and how many of the keys that equal it are among the k largest.

    The search covers ``lines`` only; among maxima, int32, it covers all, but only the upper bits: a bound from below.
    """
    counts = torch.zeros(BINS.value, dtype=torch.int32, device=x.device)
    state = torch.zeros(2, dtype=torch.int32, device=x.device)
    programs = min(_blocks(x, tiling), tiling.programs)
    for shift, width in DIGITS[x.dtype]:
        count_digits[programs,](
            x, *(lines or (x, x)), state, counts, len(x),
            SHIFT=shift, WIDTH=width, LISTED=lines is not None, BLOCK=tiling.block, num_warps=WARPS,
        )  # fmt: skip
        pick_digit[1,](counts, state, k, SHIFT=shift, FIRST=shift == DIGITS[x.dtype][0][0], num_warps=WARPS)
    return state


def _line_maxima_of(x: Tensor) -> Tensor:
    return torch.empty(-(-len(x) // LINE.value), dtype=torch.int32, device=x.device)


def _blocks(x: Tensor, tiling: Tiling) -> int:
    return -(-len(x) // tiling.block)
