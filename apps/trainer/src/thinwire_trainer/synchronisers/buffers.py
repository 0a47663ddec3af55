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
    stay as they are, and a mean that is NaN is for the metrics to show.
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


class BuffersBefore:
    """The model's buffers as they were before a step's forward, for a step that is not taken after all.

    A batch that makes gradients NaN has made the statistics of its rank NaN, too, and those never forget.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._kept = model, [torch.empty_like(buffer) for buffer in model.buffers()]

    def keep(self) -> None:
        """Now."""
        _fill(self._kept, list(self._model.buffers()))

    def restore(self) -> None:
        """As they were when `keep` was called."""
        _fill(list(self._model.buffers()), self._kept)
