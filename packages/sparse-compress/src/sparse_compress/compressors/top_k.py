"""Exact top-k at a given density."""

from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.fused import step_topk
from sparse_compress.topk import topk
from sparse_compress.vector import SparseVector


class TopK:
    """The k = max(1, round(density · n)) largest of n elements by magnitude, exactly (see ``topk``).

    ``density``: 0 < density ≤ 1, else ValueError. Stateless and deterministic.
    """

    def __init__(self, density: float = 0.01) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density is {density}, expected the fraction of elements to send, 0 < density ≤ 1")
        self.density = density

    def __call__(self, tensor: Tensor) -> SparseVector:
        return topk(tensor, self.entries(tensor.numel()))

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Accumulate, select and clear in one sweep (see ``FusedCompressor``)."""
        return step_topk(before, gradient, momentum, self.entries(gradient.numel()), out)

    def entries(self, numel: int) -> int:
        """k: exactly as many entries are sent; 0 only for an empty tensor."""
        return min(numel, max(1, round(self.density * numel)))

    def __repr__(self) -> str:
        return f"TopK(density={self.density})"
