# mypy: ignore-errors
# (Triton's language is not typed.)
"""Radix select: the k-th largest key, digit by digit from the top, a launch of each kernel for every digit.

``state`` is int32, (2,): the known digits, at their places in the key, and the rank (from 1) of the wanted key among
those that agree with them.
"""

import triton
import triton.language as tl

from sparse_compress.gpu.lines import LINE, block_lines, elements_of, listed_lines, magnitude_key

BINS = tl.constexpr(256)  # digits of up to 8 bits: Triton's histogram works bit by bit, and a bin per thread and warp


@triton.jit
def count_digits(
    x, listed, total, state, counts, n,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Adds to ``counts`` how often each digit (bits SHIFT … SHIFT + WIDTH − 1) occurs under the known ones.

    With LISTED only the ``total`` lines of the list count. Each program adds up many blocks before it adds to
    ``counts``, where all programs meet. Digit 0 is not counted, because its count is not needed; so elements that
    do not belong may pass as a 0. Integer atomics: any order gives the same counts.
    """
    known = tl.load(state) >> (SHIFT + WIDTH)
    elements = n
    if LISTED:
        elements = tl.load(total) * LINE
    found = tl.zeros([BINS], dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        if LISTED:
            at, wanted = listed_lines(listed, elements // LINE, block, n, BLOCK)
        else:
            lines = block_lines(block, BLOCK)
            at = elements_of(lines)
            wanted = at < n
        keys = tl.reshape(magnitude_key(tl.load(x + at, mask=wanted, other=0)), [BLOCK])
        found += tl.histogram(tl.where(keys >> (SHIFT + WIDTH) == known, (keys >> SHIFT) & ((1 << WIDTH) - 1), 0), BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + bins, found, mask=(found > 0) & (bins > 0), sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def pick_digit(counts, state, k, SHIFT: tl.constexpr, FIRST: tl.constexpr):  # noqa: N803
    """Finds the next digit from ``counts``, and clears them; one program. For the FIRST the rank is ``k``."""
    bins = tl.arange(0, BINS)
    found = tl.load(counts + bins)
    tl.store(counts + bins, tl.zeros_like(found))
    rank = k
    if not FIRST:
        rank = tl.load(state + 1)
    reach = tl.cumsum(found, 0, reverse=True) >= rank  # true up to the digit that the key of this rank has
    digit = tl.sum((reach & (bins > 0)).to(tl.int32))
    tl.store(state, tl.load(state) | digit << SHIFT)
    tl.store(state + 1, rank - tl.sum(tl.where(bins > digit, found, 0)))
