"""Buffers such as batch normalisation's running statistics, which differ between ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from communicators import Communicator, allreduce
from torch import nn


@contextmanager
def averaged_buffers(model: nn.Module, comm: Communicator) -> Iterator[None]:
    """Inside the block the model's floating-point buffers are their means over ranks; afterwards, its own again.

    Averaging a copy keeps evaluations, and where they happen, from changing the run. Integer buffers (counters)
    stay as they are, and a mean that is NaN is for the metrics to show: with --nonfinite skip such a run goes on, where
    `communicators.replicas.buffers` refuses it.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        yield
        return
    own = [buffer.clone() for buffer in buffers]
    mean = allreduce(torch.cat([buffer.double().flatten() for buffer in buffers]), comm, average=True)
    _fill(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]))
    try:
        yield
    finally:
        _fill(buffers, own)


def _fill(buffers: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value.view_as(buffer))
