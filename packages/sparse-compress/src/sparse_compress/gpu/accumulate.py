# mypy: ignore-errors
# (Triton's language is not typed.)
"""First sweep: accumulate, and find the largest magnitude of every line."""

import triton
import triton.language as tl

from sparse_compress.gpu.lines import block_lines, elements_of, store_maxima


@triton.jit
def accumulate(
    gradient, residual, new_residual, velocity, new_velocity, maxima, momentum, n,
    MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """u ← momentum·u + g; v ← v + u, or without momentum v ← v + g, in float32; and the maxima of v's lines.

    New and old may be the same memory: every element is read and written by one thread, in this order.
    """
    lines = block_lines(tl.program_id(0), BLOCK)
    at = elements_of(lines)
    inside = at < n
    step = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
    if MOMENTUM:
        step = tl.load(velocity + at, mask=inside, other=0) * momentum + step  # two roundings: compiled without fusion
        tl.store(new_velocity + at, step, mask=inside)
    total = tl.load(residual + at, mask=inside, other=0) + step
    tl.store(new_residual + at, total, mask=inside)
    store_maxima(maxima, lines, total, n)


@triton.jit
def find_maxima(x, maxima, n, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the maxima of the lines of ``x``."""
    lines = block_lines(tl.program_id(0), BLOCK)
    at = elements_of(lines)
    store_maxima(maxima, lines, tl.load(x + at, mask=at < n, other=0), n)
