"""NaN and inf, found without waiting for a device."""

from functools import cache
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from sparse_compress.native.dense import finite
from sparse_compress.native.library import take
from sparse_compress.vector import SparseVector, takes


def all_finite(x: Tensor) -> Tensor:
    """Whether all elements are finite: bool, 0-D, on x's device; no temporary of x's size."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    if take(x):
        return _constant(finite(x.data_ptr(), x.numel()))
    if x.is_cpu and x.dtype != torch.bfloat16:  # NumPy, which starts no threads, and knows no bfloat16
        values = x.numpy()
        with np.errstate(all="ignore"):  # a sum takes one pass, but may overflow
            return _constant(isfinite(values.sum()) or (isfinite(values.min()) and isfinite(values.max())))
    least, most = torch.aminmax(x)
    return (least > -inf) & (most < inf)


def entries_finite(sparse: SparseVector) -> Tensor:
    """Whether all values of a vector are finite, like `all_finite`."""
    if takes(sparse):
        return _constant(finite(sparse.addresses[1], len(sparse)))
    return all_finite(sparse.values)


@cache
def _constant(value: bool) -> Tensor:
    """Constant tensor, which nobody writes into: making one takes longer than checking a thousand values."""
    return torch.tensor(value)
