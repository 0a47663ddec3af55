"""The sum of dense gradients in int8: a quarter of the bytes, with rounding errors fed back into the next step.

DoubleSqueeze (Tang et al., ICML 2019), block by block: `communicators.schedules`.
"""

from dataclasses import dataclass

import torch
from communicators import Schedule, schedules
from sparse_collectives import DenseReduction
from torch import Tensor

from data_parallel.lanes import State
from data_parallel.schemes.dense import DenseCompressor


@dataclass(frozen=True)
class DenseInt8(DenseCompressor):
    """Sum of dense gradients in int8, with error feedback.

    With this rank's residual e, and Q that rounds to int8 block by block:

        a ← e + gradient;  e ← a − Q(a), but for the span that this rank sums, which needs no rounding
        total ← Q(Σ a or Q(a)) by span;  e ← e + what the span's owner has rounded off;  mean ← total / ranks

    Scales are powers of two, so sums of what is rounded and of what is left over are exact where float32 is.
    """

    name = "dense-int8"

    def schedule(
        self, accumulated: Tensor, rank: int, size: int, state: State | None = None
    ) -> Schedule[DenseReduction[Tensor]]:
        """The quantised sum, and what was rounded off here."""
        rounded = yield from schedules.quantised_allreduce(accumulated, rank, size)
        return DenseReduction(rounded.total, rounded.dropped)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuses float64, most of whose bits would wait in the residuals."""
        if dtype == torch.float64:
            raise TypeError("dense-int8 carries float32 values, but gradients are float64: take algorithm='dense'")
