"""Means over ranks, and copies of rank 0's tensors, in place; buffers of a model, such as BatchNorm's statistics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from communicators import CollectiveError, Communicator, buckets_of, run, schedules
from torch import Tensor, nn

from replicas.parameters import check_buffers, described


def average_tensors(tensors: Sequence[Tensor], comm: Communicator, *, facts: str, counts: bool | None = None) -> None:
    """Replaces floating-point tensors by their means over ranks, computed in 32 bits or more; every rank calls it.

    Args:
        tensors: Tensors of any shapes, the same on every rank.
        comm: The ranks.
        facts: Text that ranks must share, and that errors show.
        counts: Whether this rank's are in the means; where no rank's are, all are. One element more is sent then. None,
            on all ranks: they are.

    Raises:
        CollectiveError: Ranks differ in facts or sizes.
    """
    _replace(tensors, comm, f"{facts}, mean", averages=True, counts=counts)


def broadcast_tensors(tensors: Sequence[Tensor], comm: Communicator, *, facts: str) -> None:
    """Replaces tensors by rank 0's; every rank calls it.

    Args:
        tensors: Tensors of any shapes, the same on every rank.
        comm: The ranks.
        facts: Text that ranks must share, and that errors show.

    Raises:
        CollectiveError: Ranks differ in facts or sizes.
    """
    _replace(tensors, comm, f"{facts}, rank 0's", averages=False)


def broadcast_parameters(named: Mapping[str, Tensor], comm: Communicator, *, what: str, settings: str) -> None:
    """Copies rank 0's parameters into those of every rank, which must have the same ones, and the same settings.

    Args:
        named: Parameters by name.
        comm: The ranks.
        what: The caller, named in errors.
        settings: Text of the settings that ranks must share.

    Raises:
        CollectiveError: On all ranks: one has other settings, or parameters of other names, shapes, dtypes or order.
    """
    broadcast_tensors(list(named.values()), comm, facts=f"{what}({settings}, {described(named)})")


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
        ValueError: The policy is none of these, there is no model to apply it to, or it has a buffer that is sparse,
            expanded or on the meta device.
    """

    def __init__(self, model: nn.Module | None, policy: str, comm: Communicator, what: str) -> None:
        if policy not in ("keep", "average", "broadcast"):
            raise ValueError(f"buffers is {policy!r}, expected 'keep', 'average' or 'broadcast'")
        if policy != "keep" and model is None:
            raise ValueError(f"buffers={policy!r} takes the model whose buffers they are: give model=")
        if model is not None:
            check_buffers(model)
        self._model, self._policy, self._comm, self._what = model, policy, comm, what

    def at_boundary(self, *, counts: bool | None = None) -> None:
        """Shares the buffers unless the policy is "keep"; every rank calls it.

        Args:
            counts: See `average_tensors`.
        """
        if self._policy != "keep":
            self._share(self._comm, counts)

    def at_end(self, *, counts: bool | None = None) -> None:
        """Shares the buffers of "keep" as `shared` does, but for good; every rank calls it.

        Args:
            counts: See `average_tensors`.
        """
        if self._policy == "keep":
            self._share(self._comm, counts)

    @contextmanager
    def shared(self, comm: Communicator) -> Iterator[None]:
        """Shares the buffers inside, "keep" as "average"; restores every rank's own. Every rank calls it.

        Args:
            comm: The same ranks, or another communicator of them.
        """
        with restored(list(self._named().values())):
            self._share(comm)
            yield

    def _share(self, comm: Communicator, counts: bool | None = None) -> None:
        """Averages, or copies rank 0's; NaN is an error alike on every rank: they hold the same; -inf may be a mask."""
        named = {name: buffer for name, buffer in self._named().items() if buffer.numel()}
        averages = self._policy != "broadcast"
        averaged = {name: buffer for name, buffer in named.items() if averages and buffer.is_floating_point()}
        with torch.no_grad():
            average_tensors(list(averaged.values()), comm, facts=f"buffers of {self._what}", counts=counts)
            if found := [name for name, buffer in averaged.items() if bool(buffer.isnan().any())]:
                raise CollectiveError(f"{self._what}: the average of buffers {found} is NaN: one rank's holds NaN")
            copied = [buffer for name, buffer in named.items() if name not in averaged]
            broadcast_tensors(copied, comm, facts=f"buffers of {self._what}")

    def _named(self) -> dict[str, Tensor]:
        return {} if self._model is None else dict(self._model.named_buffers())


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restores the values of tensors, bit for bit, when the block ends.

    Args:
        tensors: Tensors that may be changed meanwhile.
    """
    own = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        if own:
            with torch.no_grad():
                torch._foreach_copy_(list(tensors), own)


def _replace(
    tensors: Sequence[Tensor], comm: Communicator, facts: str, *, averages: bool, counts: bool | None = None
) -> None:
    """Replaces tensors by their means, or by rank 0's, once all have come."""
    collective = schedules.allreduce if averages else schedules.broadcast
    buckets = [
        replace(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32)) if averages else bucket
        for bucket in buckets_of(tensors)
    ]

    def exchange(counts: bool | None) -> list[Tensor]:
        totals = []
        for bucket in buckets:
            x = bucket.gather(tensors)
            if counts is not None:
                x = torch.cat([x if counts else torch.zeros_like(x), x.new_full((1,), counts)])
            said = f"{facts} of {bucket.numel} elements, {bucket.dtype}"
            total = run(collective(x, comm.rank, comm.size), comm, facts=said, device=bucket.device)
            if counts is not None:
                if not total[-1]:
                    return exchange(None)
                total = total[:-1].div_(total[-1])
            elif averages:
                total.div_(comm.size)
            totals.append(total)
        return totals

    for bucket, total in zip(buckets, comm.atomic(lambda: exchange(counts)), strict=True):
        bucket.scatter(total, tensors)
