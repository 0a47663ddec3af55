"""Every kernel in Triton's interpreter, against the CPU path: a failure raises.

    python triton_interpreter.py     started by test_compress_triton.py, with TRITON_INTERPRET=1

Uninitialised memory is filled with NaN and the largest integers, so that what a kernel forgets to write shows.
"""

import os
import sys
from contextlib import nullcontext

import numpy as np
import torch
from sparse_compress import Largest, LargestOfBlocks, selection, topk
from sparse_compress.accumulator import Accumulator
from sparse_compress.gpu import select
from sparse_compress.gpu.select import Tiling

from conftest import NASTY

# n: how it is shared; few programs, which run one after another here, and some of several blocks; 65 lines in 3 blocks
SIZES = {1: Tiling(32, 1), 127: Tiling(64, 1), 1025: Tiling(32, 3), 70001: Tiling(8192, 4)}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_topk(x, k, tiling):
    before = x.clone()
    found = [select.topk(x, k, tiling=tiling).pack() for _ in range(2 if len(x) == 127 else 1)]
    for packed in found:
        assert torch.equal(packed, topk(x, k).pack()), (len(x), k, x.dtype)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))


def check_step(gradient, k, tiling, momentum, tentative):
    """Two steps, so that residuals and velocities are not zero; sent, kept and left alone are the same bits."""
    kinds = {"momentum": momentum > 0}
    ours, plain = (Accumulator.zeros(gradient, **kinds) for _ in range(2))
    for step in (gradient, gradient.flip(0) * 0.75):
        out, plain_out = (uninitialised(part) if tentative else part for part in (ours, plain))
        old = ours.clone()
        sent = select.step_topk(ours, step, momentum, k, out, tiling=tiling)
        expected = Largest(k).step(plain, step, momentum, plain_out)
        assert torch.equal(sent.pack(), expected.pack()), (len(gradient), k, gradient.dtype, momentum)
        for one, other in zip(out.flat(), plain_out.flat(), strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
        if tentative:
            assert all(torch.equal(one, other) for one, other in zip(old.flat(), ours.flat(), strict=True))
        ours, plain = out, plain_out


def check_blocks(gradient, bounds, budgets, momentum):
    """Blocks that begin anywhere, one after the other, as `LargestOfBlocks` on a GPU."""
    ours, plain = (Accumulator.zeros(gradient, momentum=momentum > 0) for _ in range(2))
    for step in (gradient, gradient.flip(0) * 0.75):
        sent = selection._triton_step(ours, step, momentum, ours, list(zip(bounds, budgets, strict=True)))
        expected = LargestOfBlocks(bounds, budgets).step(plain, step, momentum, plain)
        assert torch.equal(sent.pack(), expected.pack())
        for one, other in zip(ours.flat(), plain.flat(), strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def uninitialised(like):
    return Accumulator(*(None if part is None else torch.empty_like(part) for part in (like.residual, like.velocity)))


def main():
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    rng = np.random.default_rng(0)
    for (n, tiling), dtype in zip(SIZES.items(), (*FLOATS, torch.float32), strict=True):
        x = torch.from_numpy(NASTY["normal"](rng, n)).to(dtype)
        check_topk(x, max(1, n // 100), tiling)
        check_step(x, max(1, n // 100), tiling, momentum=0.9 if n > 127 else 0.0, tentative=n == 127)
    for number, name in enumerate(NASTY):
        x = torch.from_numpy(NASTY[name](rng, 1025)).to(FLOATS[number % 3])
        check_topk(x, (1, 600)[number % 2], Tiling(512, 2))
    check_topk(torch.ones(500)[3:].view(-1), 497, Tiling(128, 2))  # all of them, off the usual alignment
    check_step(torch.zeros(127), 5, tiling=Tiling(64, 1), momentum=0.5, tentative=True)
    torch.cuda.device = lambda _: nullcontext()
    for bounds, budgets in (([(0, 37), (37, 37), (37, 1025)], [5, 0, 20]), ([(0, 1025)], [30])):
        check_blocks(torch.from_numpy(NASTY["normal"](rng, 1025)), bounds, budgets, momentum=0.9 * (len(bounds) > 1))
    print("same bits", file=sys.stderr)


if __name__ == "__main__":
    main()
