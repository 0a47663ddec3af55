"""The device of this rank, and what time it is there."""

import os
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from thinwire_trainer.errors import RunError

Clock = Callable[[], float]
"""Seconds, monotonic."""


def own_device(local_rank: int, kind: str = "auto") -> torch.device:
    """The GPU with this rank's number on its machine (they wrap round), or the CPU where there is none.

    kind: "cpu" leaves a GPU alone; "cuda" insists on one, else RunError.

    Results are to be the same bits after a resume, so cuDNN is held to deterministic kernels, and ranks that share
    a machine's cores take one thread each unless OMP_NUM_THREADS says otherwise.
    """
    if kind == "cuda":
        insist_on_gpu()
    if kind != "cpu" and torch.cuda.is_available():
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


def insist_on_gpu() -> None:
    """RunError where there is none."""
    if not torch.cuda.is_available():
        raise RunError("--device cuda, but torch sees no GPU here: give --device cpu, or look at CUDA_VISIBLE_DEVICES")


def uses_gpu() -> bool:
    """Whether this process computes on a GPU: one that it could use, but does not, has nothing of the run."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def pinned(parts: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Parts of a batch for a GPU to fetch while it computes, pinned there, as a reading thread would wake the first."""
    if device.type != "cuda":
        return list(parts)
    with torch.cuda.device(device):
        return [part.pin_memory() for part in parts]


def clock_of(device: torch.device) -> Clock:
    """A clock for work on this device: on a GPU it waits for the queued kernels before it reads the time."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
