"""Gaussian-k: a threshold from mean and deviation (Shi et al., 2019)."""

from statistics import NormalDist

import torch
from torch import Tensor

from sparse_compress.arguments import flatten
from sparse_compress.compressors.density import Density
from sparse_compress.compressors.threshold import select_at_least, threshold_key
from sparse_compress.magnitude import magnitude_keys
from sparse_compress.selection import topk
from sparse_compress.vector import SparseVector

CORRECTIONS = 4  # sweeps that may count and correct


class GaussianK(Density):
    """Selects about k of the largest, as if the elements were normal.

        t = Φ⁻¹(1 − ρ/2) of N(μ, σ), μ and σ those of x; up to four times: count |x| ≥ t;
        fewer than ⅔k: t ← t/2; more than 4/3·k: t ← 3/2·t

    Sent are the elements that reach t, cut exactly to k where they are more, at least one unless all are zero.

    Source: Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019, algorithm 1. Differs from
    the paper: |μ| for μ, so that the threshold is positive; the exact cut; where mean or deviation overflow or are not
    finite, exact top-k. Stateless and deterministic. On a GPU every count is read back.

    Args:
        density: ρ, the share of elements to send, 0 < density ≤ 1.

    Raises:
        TypeError: density is no number.
        ValueError: density is out of range.
    """

    def __init__(self, density: float = 0.001) -> None:
        super().__init__(density)

    def __call__(self, tensor: Tensor) -> SparseVector:
        flat = flatten(tensor)
        k = self.entries(len(flat))
        threshold = self._threshold(flat) if k < len(flat) else 0.0
        if not 0 < threshold < float("inf"):
            return topk(flat, k)
        for _ in range(CORRECTIONS):
            count = int((magnitude_keys(flat) >= threshold_key(threshold, flat.dtype)).sum())
            if 3 * count < 2 * k:
                threshold *= 0.5
            elif 3 * count > 4 * k:
                threshold *= 1.5
            else:
                break
        return select_at_least(flat, threshold, k)

    def _threshold(self, flat: Tensor) -> float:
        variance, mean = torch.var_mean(flat if flat.dtype == torch.float64 else flat.float(), correction=0)
        quantile = NormalDist().inv_cdf(1 - self.density / 2) if self.density < 1 else 0.0
        return abs(float(mean)) + quantile * float(variance.sqrt())
