"""NaN and inf, found without waiting for a device."""

from functools import cache
from math import inf, isfinite

import torch
from torch import Tensor

from sparse_compress.native.dense import finite, take


def all_finite(x: Tensor) -> Tensor:
    """Whether all elements are finite: bool, 0-D, on x's device; no temporary of x's size."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    if take(x):
        return _constant(finite(x))
    if x.is_cpu:  # NumPy, which starts no threads; what is not finite shows in the least or the largest
        return torch.tensor(isfinite(x.numpy().min()) and isfinite(x.numpy().max()))
    least, most = torch.aminmax(x)
    return (least > -inf) & (most < inf)


@cache
def _constant(value: bool) -> Tensor:
    """As a tensor, which nobody writes into: made anew it takes longer than a thousand values do."""
    return torch.tensor(value)
