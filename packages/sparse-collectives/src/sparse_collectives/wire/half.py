"""Whole gradients in half the bytes: what PyTorch's bf16_compress_hook does, and the baseline of every sparse sum.

Divided by P before the sum, so that it does not overflow; what rounding takes off is lost, not kept in a residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DenseWire(NamedTuple):
    """Wire of dense gradients. dtype: the one that they are summed in; None: their own."""

    dtype: torch.dtype | None = None

    def given(self, gradient: Tensor, size: int) -> Tensor:
        """This rank's contribution to the sum. TypeError for float64, which would lose most of its bits."""
        if self.dtype is not None and gradient.dtype == torch.float64:
            raise TypeError(f"a dense sum in {self.dtype} was asked for, but gradients are float64: take wire='fp32'")
        return gradient if self.dtype is None or size == 1 else (gradient / size).to(self.dtype)

    def mean(self, total: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """The mean, from the sum of what all have given; may change the total."""
        return total.div_(size) if self.dtype is None or size == 1 else total.to(dtype)


DENSE_WIRES = {"fp32": DenseWire(), "bf16": DenseWire(torch.bfloat16), "fp16": DenseWire(torch.float16)}


def dense_wire(name: str) -> DenseWire:
    """Raises ValueError that lists the known names."""
    if name not in DENSE_WIRES:
        raise ValueError(f"wire is {name!r}, expected for a dense sum one of {', '.join(DENSE_WIRES)}")
    return DENSE_WIRES[name]
