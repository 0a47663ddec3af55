"""The GPU's rows of ``bench.compress``: kernels next to plain torch, and to copy bandwidth.

Times are medians of CUDA events around a captured graph for ours (no launch is waited for), and around eager calls
for torch, whose ``torch.topk`` cannot be captured everywhere. ``floor`` is the bytes that no step can avoid (read
gradient and residual, write the residual; or read x) at the bandwidth of a copy measured in the same run.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from sparse_compress import ErrorFeedback, TopK, topk
from torch import Tensor

Call = Callable[[], object]


class GpuRow(NamedTuple):
    """One line of the table; times in milliseconds."""

    what: str
    n: int
    k: int
    ours_ms: float
    torch_ms: float
    floor_ms: float


def report(*, full: bool) -> Iterator[GpuRow]:
    """Print and yield every row that fits the memory."""
    for n in (10**6, 10**7, 10**8, *([10**9] if full else [])):
        if 40 * n > torch.cuda.get_device_properties(0).total_memory:
            continue
        for row in measure(n):
            print(
                f"{row.what:30}{row.n:14,}{row.k:11,}{row.ours_ms:9.3f} ms{row.torch_ms:9.3f} ms"
                f"{row.torch_ms / row.ours_ms:8.1f}×{row.ours_ms / row.floor_ms:7.2f} floors",
                flush=True,
            )
            yield row


def measure(n: int) -> Iterator[GpuRow]:
    """The rows of one size."""
    x = torch.randn(n, device="cuda")
    bytes_per_ms = 8 * n / timed(partial(torch.clone, x))
    for density in (0.01, 0.001):
        k = TopK(density).entries(n)
        ours, plain = timed(captured(partial(topk, x, k))), timed(partial(torch_topk, x, k))
        yield GpuRow("top-k", n, k, ours, plain, 4 * n / bytes_per_ms)
        for name, gradient, width in (("", x, 12), (", bf16", x.bfloat16(), 10)):
            step = partial(ErrorFeedback(TopK(density)).compress, "x", gradient)
            ours, plain = timed(captured(step)), timed(torch_step(gradient, k))
            yield GpuRow(f"error feedback step{name}", n, k, ours, plain, width * n / bytes_per_ms)


def captured(call: Call) -> Call:
    """The call as a CUDA graph."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(call: Call, rounds: int = 20) -> float:
    """Median milliseconds on the device."""
    times: list[float] = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


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
