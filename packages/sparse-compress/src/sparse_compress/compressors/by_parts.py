"""Selection layer by layer, or over several tensors as one: the span of one selection."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sparse_compress.arguments import check_compressor, check_dense, flatten, integer
from sparse_compress.compressors.compressor import Compressor
from sparse_compress.vector import SparseVector
from sparse_compress.vectors import concatenate


class ByParts:
    """Applies a compressor to every part of a flat tensor by itself, such as the layers in a bucket or in a model.

    Every part that is not empty (or all zero, with thresholds) sends at least one entry. To select over a bucket or
    over the whole model instead, give its flat tensor to the compressor itself.

    Args:
        compressor: A stateless one, because one threshold or one count for all parts would fit none of them.
        shapes: Shapes or element counts of the parts, in order; they make up the whole tensor, which a call checks.

    Raises:
        TypeError: The compressor keeps state, or an entry is no shape.
        ValueError: A shape is negative; of a call, the tensor is of another size.
    """

    def __init__(self, compressor: Compressor, shapes: Sequence[int | Sequence[int]]) -> None:
        check_compressor(compressor)
        if hasattr(compressor, "state_dict"):
            raise TypeError(f"{compressor} keeps state, expected a stateless compressor for the parts")
        self.compressor = compressor
        self.numels = _numels(shapes)
        self.finds_nonfinite = getattr(compressor, "finds_nonfinite", False)

    def __call__(self, tensor: Tensor) -> SparseVector:
        check_dense(tensor, "tensor")
        self._check(tensor.numel())
        return concatenate([self.compressor(part) for part in torch.split(flatten(tensor), self.numels)])

    def entries(self, numel: int) -> int:
        """Sum of the parts' bounds."""
        self._check(numel)
        return sum(self.compressor.entries(part) for part in self.numels)

    def _check(self, numel: int) -> None:
        if numel != sum(self.numels):
            raise ValueError(f"the tensor has {numel} elements, but its parts {sum(self.numels)}: {self.numels}")

    def __repr__(self) -> str:
        return f"ByParts({self.compressor}, {self.numels})"


def _numels(shapes: Sequence[int | Sequence[int]]) -> list[int]:
    if not isinstance(shapes, Sequence) or isinstance(shapes, str):
        raise TypeError(f"shapes is {shapes!r}, expected shapes or element counts of the parts, in order")
    sides = [shape if isinstance(shape, Sequence) else [shape] for shape in shapes]
    return [
        prod(integer(side, f"part {number} has {side!r} elements, which", expected="a number") for side in shape)
        for number, shape in enumerate(sides)
    ]
