"""Selection and error feedback on a GPU: our kernels next to plain torch, and to copy bandwidth.

    python -m bench compress-gpu [--full] [--output DIR]

Times are medians of CUDA events around a captured graph for ours (no launch is waited for), and around eager calls
for torch, whose ``torch.topk`` cannot be captured everywhere. ``floor`` is the bytes that no step can avoid (read
gradient and residual, write the residual; or read x) at the bandwidth of a copy measured in the same run.
DIR gets compress-gpu.csv, .png and .json; `hatch run results` makes the package's page of them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from sparse_compress import ErrorFeedback, TopK, topk
from torch import Tensor

from bench.form import asked, parser_of
from bench.record import record

Call = Callable[[], object]


class GpuRow(NamedTuple):
    """One line of the table; times in milliseconds."""

    what: str
    n: int
    k: int
    ours_ms: float
    torch_ms: float
    floor_ms: float
    speedup: float
    ours_ms_samples: list[float]
    torch_ms_samples: list[float]


AGAINST = "torch.topk(x.abs()), the same step written with it, and one copy of the input"


def main(argv: Sequence[str] = ()) -> int:
    """Print the table, line by line as it is measured; returns the exit status."""
    parser = parser_of("compress-gpu", __doc__, full="n = 10⁹ too")
    options, facts = asked(parser, argv)
    if not torch.cuda.is_available():
        print("nothing measured: no GPU that torch can use is here")
        return 0
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    sizes = (10**6, 10**7, 10**8, *([10**9] if options.full else []))
    memory = torch.cuda.get_device_properties(0).total_memory
    rows = []
    for row in (row for n in sizes if 40 * n <= memory for row in measure(n)):
        rows.append(row)
        print(
            f"{row.what:30}{row.n:14,}{row.k:11,}{row.ours_ms:9.3f} ms{row.torch_ms:9.3f} ms"
            f"{row.speedup:8.1f}×{row.ours_ms / row.floor_ms:7.2f} floors",
            flush=True,
        )
    dicts = [row._asdict() for row in rows]
    labels = ("what", "n", "k")
    record(options.output, "compress-gpu", dicts, labels=labels, values=("speedup",), facts=facts, against=AGAINST)
    return 0


def measure(n: int) -> Iterator[GpuRow]:
    """The rows of one size."""
    x = torch.randn(n, device="cuda")
    bytes_per_ms = 8 * n / statistics.median(timed(partial(torch.clone, x)))
    for density in (0.01, 0.001):
        k = TopK(density).entries(n)
        ours, plain = timed(captured(partial(topk, x, k))), timed(partial(torch_topk, x, k))
        yield row("top-k", n, k, ours, plain, 4 * n / bytes_per_ms)
        for name, gradient, width in (("", x, 12), (", bf16", x.bfloat16(), 10)):
            step = partial(ErrorFeedback(TopK(density)).compress, "x", gradient)
            ours, plain = timed(captured(step)), timed(torch_step(gradient, k))
            yield row(f"error feedback step{name}", n, k, ours, plain, width * n / bytes_per_ms)


def row(what: str, n: int, k: int, ours: list[float], plain: list[float], floor_ms: float) -> GpuRow:
    """Of all rounds' milliseconds."""
    ours_ms, torch_ms = statistics.median(ours), statistics.median(plain)
    return GpuRow(what, n, k, ours_ms, torch_ms, floor_ms, torch_ms / ours_ms, ours, plain)


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


def torch_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The usual way."""
    indices = torch.topk(x.abs(), k, sorted=False).indices
    return indices, x[indices]


def torch_step(gradient: Tensor, k: int) -> Call:
    """A whole step as one would write it."""
    residual = torch.zeros_like(gradient, dtype=torch.float32)

    def step() -> Tensor:
        residual.add_(gradient)
        indices, values = torch_topk(residual, k)
        residual[indices] = 0
        return values

    return step
