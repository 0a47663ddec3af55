"""NaN and inf, found without waiting for a device."""

import torch
from torch import Tensor

from sparse_compress.chunks import CHUNK


def all_finite(x: Tensor) -> Tensor:
    """Whether all elements are finite: bool, 0-D, on x's device; on a CPU no temporary is larger than a chunk."""
    if not x.is_cpu:
        return torch.isfinite(x).all()
    return torch.tensor(all(bool(torch.isfinite(part).all()) for part in torch.split(x.view(-1), CHUNK)))
