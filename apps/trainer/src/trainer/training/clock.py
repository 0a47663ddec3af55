"""Wall time that counts what a GPU was given to do as done."""

import time
from collections.abc import Callable

import torch

Clock = Callable[[], float]
"""Seconds, monotonic."""


def clock_of(device: torch.device) -> Clock:
    """A clock for work on this device: on a GPU it waits for the queued kernels before it reads the time."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
