"""The kernels of sparse-compress at every level that runs here, next to NumPy: one run, in turns, least times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from sparse_compress import ErrorFeedback, TopK, WireCodec, add, merge, topk
from sparse_compress.codecs import elias_fano
from sparse_compress.native.library import LEVELS, kernels, using
from torch import Tensor

DENSITY = 0.01


class Level(NamedTuple):
    """One call in NumPy and at each level, None where that does not run; in the unit, which takes so long.

    ms_samples: of the call in every round, by level.
    """

    what: str
    n: int
    unit: str
    unit_ms: float
    plain: float
    c: float | None
    avx2: float | None
    avx512: float | None
    ms_samples: dict[str, list[float]]


def report(*, full: bool) -> Iterator[Level]:
    """Print and yield every row; least CPU time of the calling thread."""
    print(f"{'least of a run':30}{'n':>12}{'unit':>24}{'NumPy':>8}" + "".join(f"{level:>8}" for level in LEVELS))
    for n, rounds in ((10**6, 60), (25 * 10**6, 20 if full else 6)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        for what, unit, base, entries, call in _calls(x):
            taken = {level: _least(rounds, base, call, level) for level in ("plain", *LEVELS)}
            base_ms = min(pair[0] for pair in taken.values() if pair)
            scale = 1e-6 * entries if entries else base_ms
            times = {level: pair and pair[1] / scale for level, pair in taken.items()}
            by_level = times["plain"] or 0.0, times["c"], times["avx2"], times["avx512"]
            every = {level: pair[2] for level, pair in taken.items() if pair}
            cells = "".join(f"{'-' if value is None else f'{value:.2f}':>8}" for value in by_level)
            print(f"{what:30}{n:12,}{unit:>24}{cells}", flush=True)
            yield Level(what, n, unit, base_ms, *by_level, every)


def _calls(x: Tensor) -> Iterator[tuple[str, str, Callable[[], object], int, Callable[[], object]]]:
    """What, in which unit, the call that is one unit, entries where the unit is nanoseconds for one, the call."""
    n, k, sums = len(x), TopK(DENSITY).entries(len(x)), torch.zeros_like(x)
    accumulate, in_adds, read = partial(sums.add_, x), "in-place adds of g", x.sum
    for what, gradient, momentum in (
        ("step", x, 0.0),
        ("step, momentum", x, 0.9),
        ("step, bf16", x.bfloat16(), 0.0),
    ):
        yield (
            what,
            in_adds,
            accumulate,
            0,
            partial(ErrorFeedback(TopK(DENSITY), momentum=momentum).compress, "", gradient),
        )
    for density in (0.1, 0.01, 0.001):
        yield f"top-k, {density:.1%}", "read passes", read, 0, partial(topk, x, round(density * n))
    a, b = topk(x, k), topk(x.roll(n // 2), k)
    yield "merge and cut", "ns an input entry", accumulate, 2 * k, partial(merge, a, b, k)
    yield "add", "ns an input entry", accumulate, 2 * k, partial(add, a, b)
    packed = elias_fano.pack(a.indices, n)
    yield "pack indices", "ns an input entry", accumulate, k, partial(elias_fano.pack, a.indices, n)
    yield "unpack indices", "ns an input entry", accumulate, k, partial(elias_fano.unpack, packed, n, k)
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
        spent: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for one, times in zip((base, call), spent, strict=True):
                begin = time.thread_time()
                one()
                times.append(1e3 * (time.thread_time() - begin))
    return min(spent[0][1:]), min(spent[1][1:]), spent[1][1:]
