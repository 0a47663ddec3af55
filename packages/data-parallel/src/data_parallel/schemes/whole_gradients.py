"""The dense exchange: whole gradients are summed, and nothing is kept between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from communicators import Bucket, Communicator, Schedule, schedules
from sparse_collectives.wire.half import DenseWire, dense_wire
from torch import Tensor

from data_parallel.exchange import Transfer
from data_parallel.memories import MEMORIES
from data_parallel.nonfinite import first_nonfinite
from data_parallel.state_dict import refuse_residuals


class WholeGradients:
    """Scheme that sums dense gradients, half-precision ones in float32.

    wire: "bf16" or "fp16": gradients are divided by P, rounded, and summed in that; rounding errors are lost.
    """

    keeps: Sequence[str] = ()

    def __init__(self, comm: Communicator, *, wire: str = "fp32") -> None:
        self._rank, self._size, self._wire_name, self._wire = comm.rank, comm.size, wire, dense_wire(wire)
        self._facts: dict[str, str] = {}

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket and its facts."""
        del kept
        dtype = torch.promote_types(bucket.dtype, torch.float32)
        self._facts[key] = f"dense(numel={bucket.numel}, {dtype}, wire={self._wire_name})"

    def forget(self, key: str) -> dict[str, Tensor]:
        """Forgets nothing: no memories are kept."""
        del self._facts[key]
        return {}

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """The sum of scaled gradients is the scaled sum, so the scale stays."""
        del scale, unused
        gradient = flat.to(torch.promote_types(flat.dtype, torch.float32))
        given = self._wire.given(gradient, self._size)
        schedule = schedules.allreduce(given, self._rank, self._size)
        return _Sum(self._facts[key], schedule, given, gradient, self._wire, self._size)

    def commit(self) -> None:
        """Nothing to do."""

    def rollback(self) -> None:
        """Nothing to do."""

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Nothing."""
        return {memory: {} for memory in MEMORIES}

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {"algorithm_state": []}

    def reset(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for nonzero residuals, which would be lost here."""
        refuse_residuals(state["residuals"])
        self._facts = {}


@dataclass(frozen=True, eq=False)
class _Sum:
    """Transfer of a bucket's dense gradient."""

    facts: str
    schedule: Schedule[Tensor]
    summed: Tensor
    gradient: Tensor
    wire: DenseWire
    size: int

    def agreed(self, result: Tensor) -> Tensor:
        return result

    def own(self, result: Tensor) -> Tensor:
        return result[:0]

    def suspect(self) -> int:
        return first_nonfinite(self.gradient)

    def end(self, result: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.wire.mean(result, self.size, self.gradient.dtype).to(flat.dtype)
        return mean, mean
