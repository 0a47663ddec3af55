"""Between sparse and dense: what the kernels take, and where they put it."""

import torch
from torch import Tensor

from sparse_compress.native.library import kernels


def take(tensor: Tensor) -> bool:
    """Whether there are kernels, and they take this tensor: contiguous float32 on a CPU."""
    return tensor.dtype == torch.float32 and ready(tensor)


def ready(tensor: Tensor) -> bool:
    """Whether there are kernels, and they can read this tensor's memory: contiguous, on a CPU."""
    return tensor.is_cpu and kernels() is not None and tensor.is_contiguous()


def put(indices: Tensor, values: Tensor, out: Tensor, divisor: float) -> None:
    """out ← 0, and values / divisor at the indices, which increase; all of them taken."""
    kernels().sc_put(out.data_ptr(), out.numel(), indices.data_ptr(), values.data_ptr(), len(indices), divisor)


def finite(values: Tensor) -> bool:
    """Whether all values are; taken."""
    return bool(kernels().sc_finite(values.data_ptr(), values.numel()))


def increasing(indices: Tensor) -> bool:
    """Whether indices, int32 and ready, increase strictly."""
    return bool(kernels().sc_increasing(indices.data_ptr(), indices.numel()))


def add_at(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out ← out + values at the indices; all of them taken."""
    kernels().sc_add_at(out.data_ptr(), indices.data_ptr(), values.data_ptr(), len(indices))
