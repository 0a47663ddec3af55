"""Selection by a fixed threshold."""

from torch import Tensor

from sparse_compress.arguments import check_dense, positive
from sparse_compress.compressors.at_least import select_at_least
from sparse_compress.compressors.compressor import Density
from sparse_compress.vector import SparseVector


class Threshold(Density):
    """Selects all elements with |x| ≥ threshold, the k largest of them where they are more.

    Source: Strom, Interspeech 2015. Differs from the paper: values are sent unchanged, not as ± threshold; the bound
    k = max(1, round(density · n)) makes the size on the wire known to all ranks; where no element reaches, the largest
    is sent. Stateless and deterministic.

    Args:
        threshold: A magnitude, > 0 and finite.
        density: The largest share of elements to send, 0 < density ≤ 1.

    Raises:
        TypeError: One of them is no number.
        ValueError: One of them is out of range.
    """

    finds_nonfinite = True

    def __init__(self, threshold: float, density: float = 0.01) -> None:
        super().__init__(density)
        self.threshold = positive(threshold, "threshold", expected="a magnitude")

    def __call__(self, tensor: Tensor) -> SparseVector:
        check_dense(tensor, "tensor")
        return select_at_least(tensor, self.threshold, self.entries(tensor.numel()))

    def __repr__(self) -> str:
        return f"Threshold(threshold={self.threshold}, density={self.density})"
