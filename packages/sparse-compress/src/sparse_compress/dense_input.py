"""What can be compressed: dense tensors of floating-point numbers."""

import torch
from torch import Tensor

from sparse_compress.vector_format import MAX_NUMEL, WIRE_DTYPES


def flatten(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph as a 1-D view, row by row; copied only where no such view exists.

    Raises what ``check_dense`` does.
    """
    check_dense(tensor, "tensor")
    return tensor.detach().resolve_neg().reshape(-1)


def check_dense(tensor: Tensor, what: str) -> None:
    """Refuses what is no dense tensor of floats; ``what`` names the culprit in the message.

    Raises:
        TypeError: No tensor, a nested one, a sparse layout, or another dtype than float16, bfloat16, float32 and
            float64.
        ValueError: More than 2³¹ − 1 elements.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} is {type(tensor).__name__}, expected a tensor: use torch.as_tensor(…)")
    if tensor.is_nested:
        raise TypeError(f"{what} is a nested tensor, expected a plain one: give its parts")
    if tensor.layout != torch.strided:
        raise TypeError(f"{what} has layout {tensor.layout}, expected a dense one: use .to_dense()")
    if tensor.dtype not in WIRE_DTYPES:
        raise TypeError(f"{what} is {tensor.dtype}, expected one of {list(WIRE_DTYPES)}")
    if tensor.numel() > MAX_NUMEL:
        raise ValueError(
            f"{what} has {tensor.numel()} elements, at most {MAX_NUMEL} fit int32 indices: compress it in parts"
        )
