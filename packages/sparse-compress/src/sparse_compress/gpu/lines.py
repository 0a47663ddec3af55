# mypy: ignore-errors
# (Triton's language is not typed.)
"""Magnitudes of elements and of lines of elements, and places of selected ones, for the kernels."""

import triton
import triton.language as tl

LINE = tl.constexpr(16)  # elements: 64 bytes of float32, what memory fetches at once


@triton.jit
def magnitude_key(x):
    """Key of ``magnitude``, the bits without the sign; 16-bit floats in the upper half. int32 are keys already."""
    if x.dtype == tl.int32:
        keys = x
    elif x.dtype == tl.float32:
        keys = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        keys = (x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) << 16
    return keys


@triton.jit
def elements_of(lines):
    """Numbers of the elements of ``lines``, (lines, LINE), int32.

    32 bits hold any element's number (``selection.MAX_ELEMENTS``); bytes are counted by pointers, in 64 bits.
    """
    return lines[:, None] * LINE + tl.arange(0, LINE)[None, :]


@triton.jit
def block_lines(block, BLOCK: tl.constexpr):  # noqa: N803
    """Numbers of the lines of a block of BLOCK elements, (BLOCK / LINE,), int32."""
    return block * (BLOCK // LINE) + tl.arange(0, BLOCK // LINE)


@triton.jit
def listed_lines(listed, total, block, n, BLOCK: tl.constexpr):  # noqa: N803
    """Numbers of the elements in a block of the ``total`` listed lines, and a mask of those that exist."""
    places = block_lines(block, BLOCK)
    lines = tl.load(listed + places, mask=places < total, other=0)
    at = elements_of(lines)
    return at, (places < total)[:, None] & (at < n)


@triton.jit
def store_maxima(maxima, lines, x, n):
    """Writes the largest key of each line of ``x``, (lines, LINE), which holds zeros beyond n."""
    tl.store(maxima + lines, tl.max(magnitude_key(x), axis=1), mask=lines * LINE < n)


@triton.jit
def rank_of(wanted):
    """Number of wanted elements before each, row by row; ``wanted`` is int32 of 0 and 1, (lines, LINE)."""
    of_line = tl.sum(wanted, 1)
    return (tl.cumsum(of_line, 0) - of_line)[:, None] + tl.cumsum(wanted, 1) - wanted
