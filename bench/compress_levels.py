"""The kernels of sparse-compress at every level that runs here, next to NumPy: one run, in turns, least times."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from sparse_compress import ErrorFeedback, TopK, WireCodec, add, merge, topk
from sparse_compress.codecs import elias_fano
from sparse_compress.native.library import LEVELS, kernels, using
from torch import Tensor

from bench.record import Row, told
from bench.turns import milliseconds

DENSITY = 0.01


def report(*, full: bool) -> Iterator[Row]:
    """Print and yield every row; least CPU time of the calling thread.

    A row has one call in NumPy (plain) and at each level, None where that does not run, in units that take unit_ms.
    """
    yield from told(_rows(full=full), ("what", "n", "unit", "plain", *LEVELS))


def _rows(*, full: bool) -> Iterator[Row]:
    for n, rounds in ((10**6, 60), (25 * 10**6, 20 if full else 6)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        for what, unit, base, entries, call in _calls(x):
            taken = {level: _least(rounds, base, call, level) for level in ("plain", *LEVELS)}
            base_ms = min(pair[0] for pair in taken.values() if pair)
            scale = 1e-6 * entries if entries else base_ms
            times = {level: pair and pair[1] / scale for level, pair in taken.items()}
            every = {level: pair[2] for level, pair in taken.items() if pair}
            row = {"what": what, "n": n, "unit": unit, "unit_ms": base_ms}
            yield row | times | {"ms_samples": every}


def _calls(x: Tensor) -> Iterator[tuple[str, str, Callable[[], object], int, Callable[[], object]]]:
    """What, in which unit, the call that is one unit, entries where the unit is nanoseconds for one, the call."""
    n, k, sums = len(x), TopK(DENSITY).entries(len(x)), torch.zeros_like(x)
    accumulate, in_adds, read = partial(sums.add_, x), "in-place adds of g", x.sum
    for what, gradient, momentum in (("step", x, 0.0), ("step, momentum", x, 0.9), ("step, bf16", x.bfloat16(), 0.0)):
        step = partial(ErrorFeedback(TopK(DENSITY), momentum=momentum).compress, "", gradient)
        yield what, in_adds, accumulate, 0, step
    for density in (0.1, 0.01, 0.001):
        yield f"top-k, {density:.1%}", "read passes", read, 0, partial(topk, x, round(density * n))
    a, b = topk(x, k), topk(x.roll(n // 2), k)
    yield "merge and cut", "ns an input entry", accumulate, 2 * k, partial(merge, a, b, k)
    yield "add", "ns an input entry", accumulate, 2 * k, partial(add, a, b)
    packed, into = elias_fano.pack(a.indices, n), torch.empty(k, dtype=torch.int32)
    yield "pack indices", "ns an input entry", accumulate, k, partial(elias_fano.pack, a.indices, n)
    yield "unpack indices", "ns an input entry", accumulate, k, partial(elias_fano.unpack, packed, n, into)
    for kind in ("bf16", "int8"):
        yield f"{kind} and back", "ns an input entry", accumulate, k, partial(WireCodec(kind).split, a)
    yield "put back", "read passes", read, 0, partial(a.put, sums, divisor=2)


def _least(
    rounds: int, base: Callable[[], object], call: Callable[[], object], level: str
) -> tuple[float, float, list[float]] | None:
    """Least milliseconds of both, in turns, and all of the call; None where the level does not run here."""
    with using(level) as available:
        if not available or (level != "plain" and kernels() is None):
            return None
        unit, own = milliseconds((base, call), rounds, clock=time.thread_time)
    return min(unit), min(own), own
