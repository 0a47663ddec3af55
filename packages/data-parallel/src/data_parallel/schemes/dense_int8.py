"""The sum of dense gradients in int8: a quarter of the bytes, with rounding errors fed back into the next step.

See `communicators.quantised`: DoubleSqueeze (Tang et al., ICML 2019), block by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from communicators import Bucket, Communicator, Schedule, schedules
from sparse_collectives.traffic import Traffic, bruck_sent, together
from torch import Tensor

from data_parallel.exchange import Transfer
from data_parallel.memories import MEMORIES
from data_parallel.nonfinite import first_nonfinite
from data_parallel.schemes.residuals import Residuals, in_units


class Int8Sum:
    """Scheme that sums dense gradients in int8, with error feedback.

    With this rank's residual e, and Q that rounds to int8 block by block:

        a ← e + gradient;  e ← a − Q(a), but for the span that this rank sums, which needs no rounding
        total ← Q(Σ a or Q(a)) by span;  e ← e + what the span's owner has rounded off;  mean ← total / ranks

    Scales are powers of two, so sums of what is rounded and of what is left over are exact where float32 is.
    """

    keeps: Sequence[str] = MEMORIES[:1]

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._residuals = comm, Residuals()
        self._facts: dict[str, str] = {}

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket and its facts. TypeError for float64, most of whose bits would wait in the residuals."""
        if bucket.dtype == torch.float64:
            raise TypeError("dense-int8 carries float32 values, but gradients are float64: take algorithm='dense'")
        self._residuals.register(key, kept)
        self._facts[key] = f"dense-int8(numel={bucket.numel})"

    def forget(self, key: str) -> dict[str, Tensor]:
        """Forgets the bucket, and returns its residual."""
        del self._facts[key]
        return self._residuals.forget(key)

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """Transfer of the accumulated gradient."""
        total = self._residuals.accumulated(key, in_units(flat, scale), unused)
        return _Quantised(self._facts[key], self._residuals, self._comm, key, total, scale, unused)

    def commit(self) -> None:
        """Keeps this step's residuals."""
        self._residuals.commit()

    def rollback(self) -> None:
        """Restores the residuals from before the step."""
        self._residuals.rollback()

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Residuals by bucket: references."""
        return self._residuals.kept()

    def state_dict(self) -> dict[str, Any]:
        """Empty: there is no state besides residuals."""
        return {"algorithm_state": []}

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets."""
        self._residuals.reset(state)
        self._facts = {}


@dataclass(frozen=True, eq=False)
class _Quantised:
    """Transfer of a bucket in int8. given: the accumulated gradient, flat."""

    facts: str
    residuals: Residuals
    comm: Communicator
    key: str
    given: Tensor
    scale: float
    unused: Sequence[slice]
    summed: None = None

    @property
    def schedule(self) -> Schedule[schedules.Rounded]:
        return schedules.quantised_allreduce(self.given, self.comm.rank, self.comm.size)

    def agreed(self, result: schedules.Rounded) -> Tensor:
        return result.total

    def own(self, result: schedules.Rounded) -> Tensor:
        return result.dropped

    def suspect(self) -> int:
        return first_nonfinite(self.given)

    def end(self, result: schedules.Rounded, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean for the optimizer: scaled, and in the gradient's own dtype, which may overflow."""
        self.residuals.put(self.key, result.dropped, self.unused)
        mean = (result.total / self.comm.size * self.scale).to(flat.dtype)
        return mean, mean


def dense_int8_sent(rank: int, size: int, numel: int) -> Traffic:
    """Exact traffic of a rank: all spans but its own, then Bruck's share of all."""
    if size == 1:
        return Traffic(0, 0, 0)
    nbytes = [schedules.quantised_nbytes(high - low) for low, high in schedules.quantised_spans(numel, size)]
    split = Traffic.of_bodies(sum(nbytes) - nbytes[rank], size - 1, 1)
    return together(split, bruck_sent(nbytes, rank))
