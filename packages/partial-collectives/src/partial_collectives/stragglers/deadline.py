"""A deadline for the micro-batches of a step (DropCompute, Giladi et al., NeurIPS 2023)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def until_deadline(
    micro_batches: Iterable[T], seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[T]:
    """The micro-batches that begin within `seconds` from the first; at least that one.

        samples = 0
        for batch in until_deadline(micro_batches, 0.5):
            loss(batch).backward()       # sums over its samples
            samples += len(batch)
        for p in model.parameters():
            p.grad /= samples            # the mean over those that were in time
        optimizer.step(weight=samples)   # of a weighted EagerSGD: what was left out is not counted either

    Args:
        micro_batches: Micro-batches, taken one at a time as they are needed.
        seconds: Time from the first one's beginning.
        clock: `comm.clock` in a simulated world.

    Yields:
        Those that begin in time.
    """
    if not seconds > 0:
        raise ValueError(f"the deadline is {seconds} s, expected more than 0")
    end: float | None = None
    for micro_batch in micro_batches:
        if end is not None and clock() >= end:
            return
        end = clock() + seconds if end is None else end
        yield micro_batch
