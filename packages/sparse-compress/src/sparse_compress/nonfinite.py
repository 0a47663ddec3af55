"""NaN and inf, found without waiting for a device."""

from math import inf

import torch
from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Whether all elements are finite: bool, 0-D, on x's device; one read of x and no temporary of its size."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    least, most = torch.aminmax(x)  # both NaN where any element is
    return (least > -inf) & (most < inf)
