# mypy: ignore-errors
# (Triton's language is not typed.)
"""Magnitudes of elements and of lines of elements, for the kernels."""

import triton
import triton.language as tl

LINE = tl.constexpr(32)  # elements: 128 bytes of float32, a line of the GPU's caches


@triton.jit
def magnitude_key(x):
    """Bits without the sign, as in ``magnitude``; those of 16-bit floats in the upper half. int32 are keys already."""
    if x.dtype == tl.int32:
        keys = x
    elif x.dtype == tl.float32:
        keys = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        keys = (x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) << 16
    return keys


@triton.jit
def block_lines(BLOCK: tl.constexpr):  # noqa: N803
    """The numbers of this program's lines, (BLOCK / LINE,), and of their elements, (BLOCK / LINE, LINE), int32.

    32 bits hold any element's number (``available.MAX_ELEMENTS``); bytes are counted by pointers, in 64 bits.
    """
    lines = tl.program_id(0) * (BLOCK // LINE) + tl.arange(0, BLOCK // LINE)
    return lines, lines[:, None] * LINE + tl.arange(0, LINE)[None, :]


@triton.jit
def store_maxima(maxima, lines, x, n):
    """Write the largest key of each line of ``x``, (lines, LINE), which holds zeros beyond n."""
    tl.store(maxima + lines, tl.max(magnitude_key(x), axis=1), mask=lines * LINE < n)


@triton.jit
def reaching_lines(maxima, lines, bound, n):
    """Which lines have an element whose key is at least ``bound``."""
    return tl.load(maxima + lines, mask=lines * LINE < n, other=-1) >= bound
