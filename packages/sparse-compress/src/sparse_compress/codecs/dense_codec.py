"""Dense tensors in fewer bytes: the first thing to try before anything sparse."""

import torch
from torch import Tensor

from sparse_compress.arguments import element_count, flatten
from sparse_compress.codecs.rounding import VALUES, aligned, leftover


class DenseCodec:
    """Wire form of dense float32 tensors: bf16 (half the bytes, the usual first choice), fp16, int8 or fp32.

        rounded, error = codec.split(gradient)   # rounded + error = gradient, exactly
        message = codec.encode(rounded)          # decode(message) is rounded, bit for bit

    Sizes follow from the number of elements; there is no header.

    Args:
        values: "bf16", "fp16", "int8" or "fp32".

    Raises:
        ValueError: Another name.
    """

    def __init__(self, values: str = "bf16") -> None:
        if values not in list(VALUES):
            raise ValueError(f"values={values!r} given, expected one of {list(VALUES)}")
        self.values = values

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` elements."""
        return VALUES[self.values].nbytes(numel)

    def split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Splits a tensor into the values that ``encode`` keeps, and the rounding error.

        Args:
            tensor: float32, of any shape.

        Returns:
            (rounded, error), both 1-D float32; rounded + error = tensor, exactly. The error of NaN and inf is 0.

        Raises:
            TypeError: The tensor is not float32.
        """
        rounded = self.decode(self.encode(tensor), tensor.numel())
        return rounded, leftover(flatten(tensor), rounded, torch.empty_like(rounded))

    def encode(self, tensor: Tensor) -> Tensor:
        """Encodes a tensor as a message: uint8, (nbytes,).

        Args:
            tensor: float32, of any shape.

        Raises:
            TypeError: The tensor is not float32.
        """
        flat = flatten(tensor)
        if flat.dtype != torch.float32:
            raise TypeError(f"tensor is {flat.dtype}, expected torch.float32")
        return VALUES[self.values].pack(flat)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        """Decodes the tensor of a message: float32, (numel,), in memory of its own.

        Args:
            message: uint8, 1-D.
            numel: Elements of the tensor.

        Raises:
            TypeError: The message is no uint8 tensor.
            ValueError: The message has another length, or on a CPU a corrupted scale.
        """
        kind, message, numel = VALUES[self.values], aligned(message), element_count(numel)
        if message.numel() != kind.nbytes(numel):
            raise ValueError(f"{message.numel()} bytes given, but {numel} elements take {self.nbytes(numel)}")
        return kind.unpack(message, torch.empty(numel, dtype=torch.float32, device=message.device))

    def __repr__(self) -> str:
        return f"DenseCodec(values={self.values!r})"
