"""Values and indices in fewer bytes, by the kernels."""

import torch
from torch import Tensor

from sparse_compress.native.library import kernels


def to_bf16(x: Tensor) -> Tensor:
    """Packs float32, (k,), as bfloat16 in uint8, (2k,)."""
    packed = torch.empty(2 * len(x), dtype=torch.uint8)
    kernels().sc_to_bf16(x.data_ptr(), len(x), packed.data_ptr())
    return packed


def of_bf16(data: Tensor, count: int, out: Tensor | None) -> Tensor:
    """Unpacks ``count`` values, float32, from bfloat16 in at least as many bytes."""
    values = torch.empty(count, dtype=torch.float32) if out is None else out
    kernels().sc_of_bf16(data.data_ptr(), count, values.data_ptr())
    return values


def to_steps(x: Tensor, packed: Tensor) -> int:
    """Packs float32, (k,), as int8 into uint8, (k,): steps of a power of two, whose exponent is returned."""
    power: int = kernels().sc_to_int8(x.data_ptr(), len(x), packed.data_ptr())
    return power


def of_steps(steps: Tensor, power: int, out: Tensor | None) -> Tensor:
    """Unpacks float32, (k,), from steps, int8."""
    values = torch.empty(len(steps), dtype=torch.float32) if out is None else out
    kernels().sc_of_int8(steps.data_ptr(), len(steps), power, values.data_ptr())
    return values


def leftover(x: Tensor, rounded: Tensor, out: Tensor | None) -> Tensor:
    """Rounding error x − rounded, both taken; 0 where that is not finite."""
    error = torch.empty(len(x), dtype=torch.float32) if out is None else out
    kernels().sc_leftover(x.data_ptr(), rounded.data_ptr(), len(x), error.data_ptr())
    return error


def pack_indices(indices: Tensor, low: int, high: int, nbytes: int) -> Tensor:
    """Packs increasing indices, int32 and below the numel that gave low and high, as uint8, (nbytes,)."""
    packed = torch.empty(nbytes, dtype=torch.uint8)
    kernels().sc_pack_indices(indices.data_ptr(), len(indices), low, high, packed.data_ptr())
    return packed


def unpack_indices(data: Tensor, count: int, low: int, high: int, out: Tensor | None) -> tuple[Tensor, int]:
    """Unpacks the indices, int32, (count,), and returns their number; if it is another, they are incomplete."""
    indices = torch.empty(count, dtype=torch.int32) if out is None else out
    return indices, kernels().sc_unpack_indices(data.data_ptr(), count, low, high, indices.data_ptr())
