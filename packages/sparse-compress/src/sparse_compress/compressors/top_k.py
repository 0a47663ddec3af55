"""Exact top-k at a given density."""

from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.arguments import check_dense
from sparse_compress.compressors.compressor import Density
from sparse_compress.selection import step_topk
from sparse_compress.topk import topk
from sparse_compress.vector import SparseVector


class TopK(Density):
    """Selects the k = max(1, round(density · n)) largest of n elements by magnitude, exactly (see ``topk``).

    Stateless and deterministic; always k entries.

    Args:
        density: The share of elements to send, 0 < density ≤ 1.

    Raises:
        TypeError: density is no number.
        ValueError: density is out of range.
    """

    finds_nonfinite = True

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(density)

    def __call__(self, tensor: Tensor) -> SparseVector:
        check_dense(tensor, "tensor")
        return topk(tensor, self.entries(tensor.numel()))

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Accumulates, selects and clears in one sweep."""
        return step_topk(before, gradient, momentum, self.entries(gradient.numel()), out)
