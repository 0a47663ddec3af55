"""Selection, error feedback and merging, next to what one would write in plain torch.

    python -m bench compress [--full] [--output DIR]

All sides of a row take turns within one run, on one thread; times are medians of CPU milliseconds, page
faults included. ``sweeps`` is our time in units of one read of the input (its sum).
Then the compiled kernels at every level next to NumPy (``compress_levels``).
DIR gets compress.csv, .png and .json; `hatch run results` makes the package's page of them.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from sparse_compress import ErrorFeedback, SparseVector, TopK, merge, topk
from torch import Tensor

from bench import compress_levels
from bench.record import asked, parser_of, record, told, with_quantiles
from bench.turns import milliseconds

Call = Callable[[], object]


Row = dict[str, Any]
"""One line of the table; times in CPU milliseconds, of all threads together."""

LABELS, THREADS = ("what", "n", "k"), ("what", "n", "k", "threads", "one_ms", "more_ms")
AGAINST = "torch.topk(x.abs()) and the same step written with it"


def main(argv: Sequence[str] = ()) -> None:
    """Print the table, line by line as it is measured."""
    parser = parser_of("compress", __doc__, full="more rounds and n = 10⁸: minutes")
    options = asked(parser, argv)
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in options.facts.items()))
    more: dict[str, Any] = {"threads": [{**row, **with_quantiles(row)} for row in told(report_threads(), THREADS)]}
    more["levels"] = list(compress_levels.report(full=options.full))
    shown, rows = (*LABELS, "ours_ms", "torch_ms", "speedup", "sweeps"), measure(full=options.full)
    record(options, rows, labels=LABELS, values=("speedup",), against=AGAINST, shown=shown, **more)


def measure(*, full: bool) -> Iterator[Row]:
    """Every row of the table."""
    rounds = 15 if full else 5
    for n in (10**6, 25_600_000, *([10**8] if full else [])):
        x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        for density in (0.01, 0.001):
            k = TopK(density).entries(n)
            yield compare("top-k", x, k, rounds, partial(topk, x, k), partial(torch_topk, x, k))
            yield compare("error feedback step", x, k, rounds, feedback_step(x, density), torch_feedback_step(x, k))
            if n == 25_600_000:
                half = x.bfloat16()
                ours, plain = feedback_step(half, density), torch_feedback_step(half, k)
                yield compare("error feedback step, bf16", x, k, rounds, ours, plain)
    for name, x in misleading(10**7):
        k = len(x) // 100
        yield compare(f"top-k, {name}", x, k, 5, partial(topk, x, k), partial(torch_topk, x, k))
    yield merge_row(25_000_000, 250_000, rounds)


def report_threads() -> Iterator[Row]:
    """What more than one thread costs: as many as there are cores, at least two."""
    n, density, threads = 25_600_000, 0.01, max(2, os.cpu_count() or 0)
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    k = TopK(density).entries(n)
    a, b = topk(x, k), topk(x.roll(n // 2), k)
    calls: dict[str, Call] = {
        "top-k": partial(topk, x, k),
        "error feedback step": feedback_step(x, density),
        "error feedback step, bf16": feedback_step(x.bfloat16(), density),
        "merge": partial(merge, a, b, k),
    }
    for what, call in calls.items():
        one, more = milliseconds([with_threads(1, call), with_threads(threads, call)], 5)
        one_ms, more_ms = statistics.median(one), statistics.median(more)
        row: Row = {"what": what, "n": n, "k": k, "threads": threads, "one_ms": one_ms, "more_ms": more_ms}
        yield row | {"one_ms_samples": one, "more_ms_samples": more}
    torch.set_num_threads(1)


def with_threads(threads: int, call: Call) -> Call:
    """The call, after torch was given so many threads."""

    def run() -> object:
        torch.set_num_threads(threads)
        return call()

    return run


def compare(what: str, x: Tensor, k: int, rounds: int, ours: Call, plain: Call) -> Row:
    """Time the calls and one read of x in turns."""
    taken = milliseconds([ours, plain, x.sum], rounds)
    ours_ms, torch_ms, read_ms = map(statistics.median, taken)
    row: Row = {"what": what, "n": len(x), "k": k, "ours_ms": ours_ms, "torch_ms": torch_ms}
    row |= {"speedup": torch_ms / ours_ms, "sweeps": ours_ms / read_ms}
    return row | {"ours_ms_samples": taken[0], "torch_ms_samples": taken[1]}


def torch_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The usual way: indices and values, ties anyhow."""
    indices = torch.topk(x.abs(), k, sorted=False).indices
    return indices, x[indices]


def feedback_step(gradient: Tensor, density: float) -> Call:
    """A whole step of ours."""
    feedback = ErrorFeedback(TopK(density))
    return lambda: feedback.compress("x", gradient)


def torch_feedback_step(gradient: Tensor, k: int) -> Call:
    """A whole step as one would write it: add, abs, top-k, gather, scatter."""
    residual = torch.zeros_like(gradient, dtype=torch.float32)

    def step() -> Tensor:
        residual.add_(gradient)
        indices, values = torch_topk(residual, k)
        residual[indices] = 0
        return values

    return step


def misleading(n: int) -> Iterator[tuple[str, Tensor]]:
    """Inputs that a sampled threshold alone does not settle."""
    generator = torch.Generator().manual_seed(0)
    yield "constant", torch.ones(n)
    yield "zeros", torch.zeros(n)
    yield "7 values", torch.randint(-3, 4, (n,), generator=generator).float()
    yield "few non-zeros", torch.where(torch.rand(n, generator=generator) < 0.005, 1.0, 0.0)
    steep = torch.rand(n, generator=generator)
    steep[:: n // 32768 | 1] = 0  # exactly what is sampled
    yield "sample misled", steep


def merge_row(n: int, k: int, rounds: int) -> Row:
    """Two vectors of k entries, a third of them shared, merged and cut to k; sweeps are over both vectors."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    a, b = topk(x[0] + x[1], k), topk(x[0] + x[2], k)
    entries = torch.cat([a.values, b.values])
    ours, plain = partial(merge, a, b, k), partial(torch_merge, a, b, k)
    return compare("merge", entries, k, 4 * rounds, ours, plain) | {"n": n}


def torch_merge(a: SparseVector, b: SparseVector, k: int) -> tuple[Tensor, Tensor]:
    """The usual way: unique indices, scatter-add, top-k."""
    indices, where = torch.unique(torch.cat([a.indices, b.indices]), return_inverse=True)
    values = torch.zeros(len(indices)).index_add_(0, where, torch.cat([a.values, b.values]))
    kept, kept_values = torch_topk(values, k)
    return indices[kept], kept_values
