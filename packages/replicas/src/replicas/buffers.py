"""Buffers of a model, such as BatchNorm's statistics: each rank's own, or shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from communicators import CollectiveError, Communicator
from torch import Tensor, nn

from replicas.averaging import average, copy_from_first


class Buffers:
    """Buffers of a model under one policy.

    policy "keep": every rank has its own until the end; "average": their mean at boundaries; "broadcast": rank 0's.
    Means are of floating-point buffers; others, such as counters, become rank 0's everywhere.
    """

    def __init__(self, model: nn.Module | None, policy: str, comm: Communicator, what: str) -> None:
        self._model, self._policy, self._comm, self._what = model, policy, comm, what

    def at_boundary(self) -> None:
        """Shares the buffers unless the policy is "keep". For every rank to call."""
        if self._policy != "keep":
            self._share(self._comm)

    def at_end(self) -> None:
        """Shares the buffers of "keep" as `shared` does, but for good. For every rank to call."""
        if self._policy == "keep":
            self._share(self._comm)

    @contextmanager
    def shared(self, comm: Communicator) -> Iterator[None]:
        """Shares the buffers inside, "keep" as "average"; restores every rank's own. For every rank to call."""
        buffers = self._all()
        own = [buffer.clone() for buffer in buffers]
        try:
            self._share(comm)
            yield
        finally:
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)

    def _share(self, comm: Communicator) -> None:
        buffers = [buffer for buffer in self._all() if buffer.numel()]
        averaged = [b for b in buffers if b.is_floating_point() and self._policy != "broadcast"]
        copied = [b for b in buffers if not any(b is one for one in averaged)]
        with torch.no_grad():
            average(averaged, comm, facts=f"buffers of {self._what}")
            self._refuse_nan(averaged)
            copy_from_first(copied, comm, facts=f"buffers of {self._what}")

    def _refuse_nan(self, averaged: list[Tensor]) -> None:
        """Raises CollectiveError for NaN, alike on every rank: they hold the same means; -inf may be a mask."""
        names = {id(b): name for name, b in self._model.named_buffers()} if self._model is not None else {}
        if found := [names[id(b)] for b in averaged if bool(b.isnan().any())]:
            raise CollectiveError(f"{self._what}: the average of buffers {found} is NaN: one rank's holds NaN")

    def _all(self) -> list[Tensor]:
        return [] if self._model is None else list(self._model.buffers())
