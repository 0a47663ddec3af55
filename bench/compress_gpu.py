"""Selection and error feedback on a GPU: our kernels next to plain torch, and to copy bandwidth.

    python -m bench compress-gpu [--full] [--output DIR]

Times are medians of CUDA events around a captured graph for ours (no launch is waited for), and around eager calls
for torch, whose ``torch.topk`` cannot be captured everywhere. ``floor`` is the bytes that no step can avoid (read
gradient and residual, write the residual; or read x) at the bandwidth of a copy measured in the same run.
DIR gets compress-gpu.csv, .png and .json; `hatch run results` makes the package's page of them.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from sparse_compress import ErrorFeedback, TopK, topk

from bench.compress import LABELS, Call, torch_feedback_step, torch_topk
from bench.record import asked, parser_of, record

AGAINST = "torch.topk(x.abs()), the same step written with it, and one copy of the input"


def main(argv: Sequence[str] = ()) -> None:
    """Prints the table."""
    parser = parser_of("compress-gpu", __doc__, full="n = 10⁹ too")
    options = asked(parser, argv)
    if not torch.cuda.is_available():
        print("nothing measured: no GPU that torch can use is here")
        return
    print(", ".join(f"{name} {value}" for name, value in options.facts.items()))
    sizes = (10**6, 10**7, 10**8, *([10**9] if options.full else []))
    memory = torch.cuda.get_device_properties(0).total_memory
    rows = (row for n in sizes if 40 * n <= memory for row in measure(n))
    shown = (*LABELS, "ours_ms", "torch_ms", "floor_ms", "speedup")
    record(options, rows, labels=LABELS, values=("speedup",), against=AGAINST, shown=shown)


def measure(n: int) -> Iterator[dict[str, Any]]:
    """The rows of one size."""
    x = torch.randn(n, device="cuda")
    bytes_per_ms = 8 * n / statistics.median(timed(partial(torch.clone, x)))
    for density in (0.01, 0.001):
        k = TopK(density).entries(n)
        ours, plain = timed(captured(partial(topk, x, k))), timed(partial(torch_topk, x, k))
        yield _row("top-k", n, k, ours, plain, 4 * n / bytes_per_ms)
        for name, gradient, width in (("", x, 12), (", bf16", x.bfloat16(), 10)):
            step = partial(ErrorFeedback(TopK(density)).compress, "x", gradient)
            ours, plain = timed(captured(step)), timed(torch_feedback_step(gradient, k))
            yield _row(f"error feedback step{name}", n, k, ours, plain, width * n / bytes_per_ms)


def _row(what: str, n: int, k: int, ours: list[float], plain: list[float], floor_ms: float) -> dict[str, Any]:
    """Milliseconds of all rounds, and their medians."""
    ours_ms, torch_ms = statistics.median(ours), statistics.median(plain)
    row = {"what": what, "n": n, "k": k, "ours_ms": ours_ms, "torch_ms": torch_ms, "floor_ms": floor_ms}
    return row | {"speedup": torch_ms / ours_ms, "ours_ms_samples": ours, "torch_ms_samples": plain}


def captured(call: Call) -> Call:
    """The call as a CUDA graph."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(call: Call, rounds: int = 20) -> list[float]:
    """Milliseconds of every round on the device."""
    times: list[float] = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times[3:]
