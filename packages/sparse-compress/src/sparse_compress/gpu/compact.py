# mypy: ignore-errors
# (Triton's language is not typed.)
"""Deterministic compaction: the selected entries in index order, exactly k of them.

Selected are all keys above the k-th largest, and the first ``ties`` of those that equal it. ``state`` is radix
select's: the k-th largest key, and ``ties``.
"""

import triton
import triton.language as tl

from sparse_compress.gpu.lines import block_lines, magnitude_key, reaching_lines


@triton.jit
def count_selected(x, maxima, state, above, equal, n, BLOCK: tl.constexpr):  # noqa: N803
    """For each block how many keys are above the k-th largest, and how many equal it."""
    kth = tl.load(state)
    lines, at = block_lines(BLOCK)
    wanted = (at < n) & reaching_lines(maxima, lines, kth, n)[:, None]
    keys = magnitude_key(tl.load(x + at, mask=wanted, other=0))
    block = tl.program_id(0)
    tl.store(above + block, tl.sum((wanted & (keys > kth)).to(tl.int32)))
    tl.store(equal + block, tl.sum((wanted & (keys == kth)).to(tl.int32)))


@triton.jit
def write_selected(
    x, velocity, maxima, state, above, equal, indices, values, n,
    CLEAR: tl.constexpr, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write this block's entries to their place, and with CLEAR set x, and velocity with MOMENTUM, to 0 there.

    ``above`` and ``equal`` now hold inclusive sums over the blocks, so the places of two blocks never overlap, and no
    element of x is touched by two programs: nothing depends on the order in which programs run.
    """
    block = tl.program_id(0)
    above_before = tl.load(above + block - 1, mask=block > 0, other=0)
    equal_before = tl.load(equal + block - 1, mask=block > 0, other=0)
    above_after, equal_after = tl.load(above + block), tl.load(equal + block)
    kth, ties = tl.load(state), tl.load(state + 1)
    if (above_after > above_before) | ((equal_after > equal_before) & (equal_before < ties)):
        lines, grid = block_lines(BLOCK)
        inside = (grid < n) & reaching_lines(maxima, lines, kth, n)[:, None]
        at, wanted = tl.reshape(grid, [BLOCK]), tl.reshape(inside, [BLOCK])
        element = tl.load(x + at, mask=wanted, other=0)
        keys = magnitude_key(element)
        tied = (wanted & (keys == kth)).to(tl.int32)
        tie = equal_before + tl.cumsum(tied, 0) - tied
        taken = wanted & ((keys > kth) | ((tied > 0) & (tie < ties)))
        place = above_before + tl.minimum(equal_before, ties) + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(indices + place, at, mask=taken)
        tl.store(values + place, element.to(tl.float32), mask=taken)
        if CLEAR:
            tl.store(x + at, tl.zeros_like(element), mask=taken)
        if MOMENTUM:
            tl.store(velocity + at, tl.zeros_like(element), mask=taken)
