# mypy: ignore-errors
# (Triton's language is not typed.)
"""Deterministic compaction, in index order: of the lines that reach a bound, then of the k elements that are selected.

Each time one kernel counts the entries of every block, torch adds the counts up, and another kernel writes each block's
into its own range: places never overlap and nothing depends on the order in which programs run.

All keys above the k-th largest are selected, and the first ``ties`` of those that equal it. ``state`` is radix
select's: the k-th largest key, and ``ties``.
"""

import triton
import triton.language as tl

from sparse_compress.gpu.lines import LINE, block_lines, elements_of, listed_lines, magnitude_key, rank_of

ABOVE = tl.constexpr(32)  # bits: a block's two counts are one int64, so that they are added up at once


@triton.jit
def count_lines(maxima, bound, counts, lines, BLOCK: tl.constexpr):  # noqa: N803
    """Counts, for each block of BLOCK maxima, how many reach the bound."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    reaches = tl.load(maxima + at, mask=at < lines, other=-1) >= tl.load(bound)
    tl.store(counts + tl.program_id(0), tl.sum(reaches.to(tl.int32)))


@triton.jit
def list_lines(maxima, bound, counts, listed, lines, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the numbers of the lines that reach the bound; ``counts`` now holds inclusive sums over the blocks."""
    block = tl.program_id(0)
    rows = block_lines(block, BLOCK)
    at = elements_of(rows)
    reaches = tl.load(maxima + at, mask=at < lines, other=-1) >= tl.load(bound)
    before = tl.load(counts + block - 1, mask=block > 0, other=0)
    tl.store(listed + before + rank_of(reaches.to(tl.int32)), at, mask=reaches)


@triton.jit
def count_selected(x, listed, total, state, counts, n, blocks, BLOCK: tl.constexpr):  # noqa: N803
    """Counts the keys above the k-th largest, times 2³², plus those that equal it, for each block of listed lines."""
    kth, lines = tl.load(state), tl.load(total)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        both = tl.zeros([], dtype=tl.int64)
        if block * BLOCK < lines * LINE:
            at, wanted = listed_lines(listed, lines, block, n, BLOCK)
            keys = magnitude_key(tl.load(x + at, mask=wanted, other=0))
            above = tl.sum((wanted & (keys > kth)).to(tl.int64))
            both = (above << ABOVE) + tl.sum((wanted & (keys == kth)).to(tl.int64))
        tl.store(counts + block, both)


@triton.jit
def write_selected(
    x, velocity, listed, total, state, counts, indices, values, n,
    CLEAR: tl.constexpr, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Writes each block's entries to their place; with CLEAR sets x, and velocity with MOMENTUM, to 0 there.

    ``counts`` now holds inclusive sums over the blocks. No element of x is touched by two programs.
    """
    kth, ties, lines = tl.load(state), tl.load(state + 1), tl.load(total)
    for block in range(tl.program_id(0), tl.cdiv(lines * LINE, BLOCK), tl.num_programs(0)):
        before = tl.load(counts + block - 1, mask=block > 0, other=0)
        above_before, equal_before = (before >> ABOVE).to(tl.int32), before.to(tl.int32)
        at, wanted = listed_lines(listed, lines, block, n, BLOCK)
        element = tl.load(x + at, mask=wanted, other=0)
        keys = magnitude_key(element)
        tied = (wanted & (keys == kth)).to(tl.int32)
        taken = wanted & ((keys > kth) | ((tied > 0) & (equal_before + rank_of(tied) < ties)))
        place = above_before + tl.minimum(equal_before, ties) + rank_of(taken.to(tl.int32))
        tl.store(indices + place, at, mask=taken)
        tl.store(values + place, element.to(tl.float32), mask=taken)
        if CLEAR:
            tl.store(x + at, tl.zeros_like(element), mask=taken)
        if MOMENTUM:
            tl.store(velocity + at, tl.zeros_like(element), mask=taken)
