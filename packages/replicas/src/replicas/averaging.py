"""Means over ranks, and copies of rank 0's tensors, in place; buffers of a model, such as BatchNorm's statistics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from communicators import Bucket, CollectiveError, Communicator, Schedule, buckets_of, run, schedules
from torch import Tensor, nn


def average_tensors(tensors: Sequence[Tensor], comm: Communicator, *, facts: str) -> None:
    """Replaces floating-point tensors by their means over ranks, computed in 32 bits or more; every rank calls it.

    Args:
        tensors: Tensors of any shapes, the same on every rank.
        comm: The ranks.
        facts: Text that ranks must share, and that errors show.

    Raises:
        CollectiveError: Ranks differ in facts or sizes.
    """
    for bucket in buckets_of(tensors):
        bucket = replace(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32))
        mean = _run(schedules.allreduce, bucket, tensors, comm, f"{facts}, mean").div_(comm.size)
        bucket.scatter(mean, tensors)


def broadcast_tensors(tensors: Sequence[Tensor], comm: Communicator, *, facts: str) -> None:
    """Replaces tensors by rank 0's; every rank calls it.

    Args:
        tensors: Tensors of any shapes, the same on every rank.
        comm: The ranks.
        facts: Text that ranks must share, and that errors show.

    Raises:
        CollectiveError: Ranks differ in facts or sizes.
    """
    for bucket in buckets_of(tensors):
        bucket.scatter(_run(schedules.broadcast, bucket, tensors, comm, f"{facts}, rank 0's"), tensors)


def broadcast_parameters(named: Mapping[str, Tensor], comm: Communicator, *, what: str, settings: str) -> None:
    """Copies rank 0's parameters into those of every rank, which must have the same ones, and the same settings.

    Args:
        named: Parameters by name.
        comm: The ranks.
        what: The caller, named in errors.
        settings: Text of the settings that ranks must share.

    Raises:
        CollectiveError: On all ranks, where one has other settings, or parameters of other names, shapes, dtypes or
            order.
    """
    listed = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named.items()]
    elements, crc = sum(p.numel() for p in named.values()), zlib.crc32(";".join(listed).encode())
    alike = f"{len(named)} parameters of {elements} elements, names and shapes {crc:08x}"
    broadcast_tensors(list(named.values()), comm, facts=f"{what}({settings}, {alike})")


class Buffers:
    """Buffers of a model under one policy, such as BatchNorm's statistics.

    Means are of floating-point buffers; others, such as counters, become rank 0's everywhere.

    Args:
        model: Module that has the buffers; None: there are none.
        policy: "keep": every rank has its own until the end; "average": their mean at boundaries; "broadcast": rank
            0's.
        comm: The ranks.
        what: The caller, named in errors.

    Raises:
        ValueError: The policy is none of these, or there is no model to apply it to.
    """

    def __init__(self, model: nn.Module | None, policy: str, comm: Communicator, what: str) -> None:
        if policy not in ("keep", "average", "broadcast"):
            raise ValueError(f"buffers is {policy!r}, expected 'keep', 'average' or 'broadcast'")
        if policy != "keep" and model is None:
            raise ValueError(f"buffers={policy!r} takes the model whose buffers they are: give model=")
        self._model, self._policy, self._comm, self._what = model, policy, comm, what

    def at_boundary(self) -> None:
        """Shares the buffers unless the policy is "keep"; every rank calls it."""
        if self._policy != "keep":
            self._share(self._comm)

    def at_end(self) -> None:
        """Shares the buffers of "keep" as `shared` does, but for good; every rank calls it."""
        if self._policy == "keep":
            self._share(self._comm)

    @contextmanager
    def shared(self, comm: Communicator) -> Iterator[None]:
        """Shares the buffers inside, "keep" as "average"; restores every rank's own. Every rank calls it.

        Args:
            comm: The same ranks, or another communicator of them.
        """
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
            average_tensors(averaged, comm, facts=f"buffers of {self._what}")
            self._refuse_nan(averaged)
            broadcast_tensors(copied, comm, facts=f"buffers of {self._what}")

    def _refuse_nan(self, averaged: list[Tensor]) -> None:
        """Raises CollectiveError for NaN, alike on every rank: they hold the same means; -inf may be a mask."""
        names = {id(b): name for name, b in self._model.named_buffers()} if self._model is not None else {}
        if found := [names[id(b)] for b in averaged if bool(b.isnan().any())]:
            raise CollectiveError(f"{self._what}: the average of buffers {found} is NaN: one rank's holds NaN")

    def _all(self) -> list[Tensor]:
        return [] if self._model is None else list(self._model.buffers())


def _run(
    collective: Callable[[Tensor, int, int], Schedule[Tensor]],
    bucket: Bucket,
    tensors: Sequence[Tensor],
    comm: Communicator,
    facts: str,
) -> Tensor:
    schedule = collective(bucket.gather(tensors), comm.rank, comm.size)
    return run(schedule, comm, facts=f"{facts} of {bucket.numel} elements, {bucket.dtype}", device=bucket.device)
