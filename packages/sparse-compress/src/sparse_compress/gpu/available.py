"""Which tensors the kernels take; importing this does not import Triton."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_ELEMENTS = 2**31 - 2**12  # the last block's element numbers still fit int32


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def kernels_take(x: Tensor) -> bool:
    """Contiguous tensors of 16 or 32 bits on a GPU, where Triton is installed. All others go the plain torch way."""
    return x.is_cuda and x.dtype != torch.float64 and x.is_contiguous() and x.numel() <= MAX_ELEMENTS and _has_triton()
