"""Work of a rank in every way, measured on this machine in simulated worlds, whose ranks take turns on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld
from data_parallel import UpdateOptimizer
from torch import nn
from torch.optim import Optimizer

from thinwire.advice.ways import DENSE, WAYS, Shapes, Work, elements

MOST_ELEMENTS = 1 << 20
"""Work is measured on at most so many elements."""
MEASURED_RANKS = (2, 4)
PLAIN = partial(torch.optim.SGD, lr=1e-3)
INNER: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(PLAIN, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Optimizers of which updates are selected."""
WARMED, REPEATS = 2, 3


def measure_work(shapes: Shapes, device: torch.device) -> dict[str, Work]:
    """Work of one rank in one exchange of each way, by name, measured in simulated worlds on this device.

    shapes: of the trained parameters; as many of them are taken as are within `MOST_ELEMENTS`, at least one.
    """
    few, found = list(_few(shapes)), {}
    numel, without = elements(few), _seconds(None, few, device, 1)
    measured: dict[Any, Work] = {}  # of ways whose exchange is the same
    for way in (*WAYS, DENSE):
        same = (
            way.algorithm.removeprefix("torch-"),
            *((key, value) for key, value in way.options.items() if key != "sync_every"),
        )
        if same not in measured:
            own = partial(_seconds, way.make, few, device, fragments=way.fragments)
            seconds = [max(0.0, own(ranks) - without) / numel for ranks in MEASURED_RANKS]
            measured[same] = _work(seconds) if way.gathers else Work(statistics.mean(seconds))
        found[way.name] = measured[same]
    return found


def measure_around(shapes: Shapes, device: torch.device, *, optimizer: str, density: float) -> float:
    """Seconds per element that `UpdateOptimizer` takes beyond the user's optimizer, but for exchanging and merging.

    shapes: as in `measure_work`.
    """

    def wrapped(inner: Optimizer, model: nn.Module, comm: Any, *, steps: int, every: int) -> Optimizer:
        return UpdateOptimizer.for_model(inner, model, comm=comm, density=lambda _: density)

    def beyond(few: Shapes) -> float:
        own, without = (_seconds(make, few, device, 1, inner=INNER[optimizer]) for make in (wrapped, None))
        return own - without

    few = list(_few(shapes))
    numel, seconds = elements(few), beyond(few)
    if numel == elements(shapes):
        return max(0.0, seconds) / numel
    fewer = list(_few(shapes, MOST_ELEMENTS // 4))  # what does not grow with the elements is not multiplied
    slope = max(0.0, seconds - beyond(fewer)) / (numel - elements(fewer))
    return slope + max(0.0, seconds - slope * numel) / elements(shapes)


def _work(seconds: Sequence[float]) -> Work:
    """Work that grows with the ranks, from that on `MEASURED_RANKS`."""
    (few, many), (small, large) = MEASURED_RANKS, seconds
    per_rank = max(0.0, (large - small) / (many - few))
    return Work(max(0.0, small - per_rank * few), per_rank)


def _few(shapes: Shapes, most: int = MOST_ELEMENTS) -> Iterator[torch.Size]:
    """The first that are within the limit together; of a larger one alone, as many rows or elements as are."""
    taken = 0
    for shape in sorted(shapes, key=torch.Size.numel, reverse=True):
        if taken + shape.numel() <= most:
            taken += shape.numel()
            yield shape
        elif not taken:
            inner = shape.numel() // shape[0]
            cut = torch.Size((most // inner, *shape[1:]) if inner <= most else (most,))
            taken += cut.numel()
            yield cut


def _seconds(
    make: Callable[..., Optimizer] | None,
    shapes: Shapes,
    device: torch.device,
    ranks: int,
    *,
    fragments: int = 1,
    inner: Callable[..., Optimizer] = PLAIN,
) -> float:
    """Seconds of a rank in a step with one exchange, the least of several: simulated ranks take turns on one core."""

    def steps(comm: Communicator) -> list[float]:
        zeros = (torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes)
        model = nn.ParameterList(map(nn.Parameter, zeros))
        optimizer: Any = inner(model.parameters())
        if make is not None:
            optimizer = make(optimizer, model, comm, steps=0, every=1)
        exchange, ahead = getattr(optimizer, "average", lambda: None), getattr(optimizer, "ahead", nullcontext)
        times = []
        for p in model:
            p.grad = torch.randn_like(p)
        for _ in range(WARMED + REPEATS):
            begin = _now(device)
            for _ in range(fragments):  # which differ in size
                with ahead():
                    pass
                optimizer.step()
                exchange()
            times.append((_now(device) - begin) / fragments)
        getattr(optimizer, "finish", lambda: None)()
        return times[WARMED:]

    return min(SimulatedWorld(ranks).run(steps)[0]) / (ranks if make else 1)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
