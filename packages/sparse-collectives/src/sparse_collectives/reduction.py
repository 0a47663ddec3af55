"""Result of a sparse allreduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sparse_compress import SparseVector
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reduction:
    """Result of a sparse allreduce. Over all ranks, inputs = total + dropped, so nothing is lost.

    Attributes:
        total: The agreed sum, the same bits on every rank.
        dropped: The part that this rank must add to its residual, in units of the sum; differs between ranks.
        size: Number of ranks in the sum. `sparse_allreduce` sets it; an algorithm leaves it out.
    """

    total: SparseVector
    dropped: SparseVector
    size: int | None = None

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The mean over ranks as a dense tensor: total / size, in one pass over ``out``, which may be the gradient.

        Args:
            out: numel elements of the total's dtype and device, of any shape; contiguous. Default: a new tensor, flat.

        Raises:
            ValueError: ``out`` does not fit, or the size is not known.
        """
        if self.size is None:
            raise ValueError("a mean is over size ranks, which a schedule's own Reduction does not know: give size=")
        if out is None:
            out = torch.empty(self.total.numel, dtype=self.total.dtype, device=self.total.device)
        return self.total.put(out, divisor=self.size)
