# mypy: disable-error-code="no-untyped-call"
# (Triton's kernels are not typed.)
"""Launches: top-k, and the fused step of error feedback (see the package's docstring for the algorithm)."""

import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.gpu.accumulate import accumulate, find_maxima
from sparse_compress.gpu.compact import count_selected, write_selected
from sparse_compress.gpu.lines import LINE
from sparse_compress.gpu.radix import BINS, count_digits, pick_digit
from sparse_compress.vector import SparseVector

BLOCK = 2048  # elements of a program
WARPS = 4
WRITE_WARPS = 8  # of write_selected, which keeps more per element in registers
UPPER_DIGITS = ((23, 8), (15, 8))  # (lowest bit, bits) of a key's digits: enough for a bound
DIGITS = {
    torch.int32: UPPER_DIGITS,
    torch.float32: (*UPPER_DIGITS, (7, 8), (0, 7)),
    torch.bfloat16: ((23, 8), (16, 7)),
    torch.float16: ((23, 8), (16, 7)),
}


def topk(x: Tensor, k: int, *, block: int = BLOCK) -> SparseVector:
    """``sparse_compress.topk`` of a contiguous 1-D tensor of 16 or 32 bits, 0 < k ≤ n; no host synchronisation."""
    maxima = _line_maxima_of(x)
    find_maxima[_grid(x, block)](x, maxima, len(x), BLOCK=block, num_warps=WARPS)
    return _take_largest(x, maxima, k, block)


def step_topk(
    before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator, *, block: int = BLOCK
) -> SparseVector:
    """``fused.step_topk`` for a contiguous gradient of 16 or 32 bits, 0 < k ≤ n; no host synchronisation.

    Sums are the same bits as on a CPU, but for the payload of NaNs.
    """
    residual = out.residual.view(-1)
    maxima = _line_maxima_of(residual)
    velocity, new_velocity = (residual if part.velocity is None else part.velocity for part in (before, out))
    accumulate[_grid(residual, block)](
        gradient, before.residual, residual, velocity, new_velocity, maxima, momentum, len(residual),
        MOMENTUM=out.velocity is not None, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return _take_largest(residual, maxima, k, block, clear=out)


def kth_largest(x: Tensor, maxima: Tensor, k: int, block: int) -> Tensor:
    """int32, (2,): the k-th largest key of ``x``, and how many of the keys that equal it are among the k largest."""
    counts = torch.zeros(BINS.value, dtype=torch.int32, device=x.device)
    bound = torch.zeros(2, dtype=torch.int32, device=x.device)
    state = torch.zeros(2, dtype=torch.int32, device=x.device)
    _settle(maxima, None, bound, bound, counts, min(k, len(maxima)), block)
    _settle(x, maxima, bound, state, counts, k, block)
    return state


def _settle(x: Tensor, maxima: Tensor | None, bound: Tensor, state: Tensor, counts: Tensor, k: int, block: int) -> None:
    for shift, width in DIGITS[x.dtype]:
        count_digits[_grid(x, block)](
            x, x if maxima is None else maxima, bound, state, counts, len(x),
            SHIFT=shift, WIDTH=width, LINES=maxima is not None, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
        pick_digit[(1,)](counts, state, k, SHIFT=shift, FIRST=shift == DIGITS[x.dtype][0][0], num_warps=WARPS)


def _take_largest(x: Tensor, maxima: Tensor, k: int, block: int, clear: Accumulator | None = None) -> SparseVector:
    state = kth_largest(x, maxima, k, block)
    grid = _grid(x, block)
    counts = torch.empty(2, grid[0], dtype=torch.int32, device=x.device)  # a row each: torch sums columns serially
    count_selected[grid](x, maxima, state, counts[0], counts[1], len(x), BLOCK=block, num_warps=WARPS)
    above, equal = counts.cumsum(1, dtype=torch.int32)
    sent = SparseVector.allocate(k, len(x), torch.float32, x.device)
    velocity = None if clear is None else clear.velocity
    write_selected[grid](
        x, x if velocity is None else velocity, maxima, state, above, equal, sent.indices, sent.values, len(x),
        CLEAR=clear is not None, MOMENTUM=velocity is not None, BLOCK=block, num_warps=WRITE_WARPS,
    )  # fmt: skip
    return sent


def _line_maxima_of(x: Tensor) -> Tensor:
    return torch.empty(-(-len(x) // LINE.value), dtype=torch.int32, device=x.device)


def _grid(x: Tensor, block: int) -> tuple[int]:
    return (-(-len(x) // block),)
