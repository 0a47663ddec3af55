"""Deep Gradient Compression's top-k by sampling (Lin et al., ICLR 2018)."""

from collections.abc import Iterable
from math import ceil

import torch
from torch import Tensor

from sparse_compress.arguments import flatten, integer, positive, share_of
from sparse_compress.compressors.density import Density
from sparse_compress.compressors.threshold import select_at_least
from sparse_compress.selection import topk
from sparse_compress.vector import SparseVector


class DGCTopK(Density):
    """Selects about k of the largest: a threshold from a sample, then the elements that reach it, cut exactly to k.

    Of n elements every 1/``sample``-th is looked at, but at least enough for 8 of the k; the threshold is the
    sample's own top-k threshold. Where more than k elements reach it, the k largest of them are sent: the paper's
    hierarchical selection. Where fewer do, fewer are sent, at least one of a tensor that is not all zero.
    The rest of DGC: momentum correction and factor masking are ``ErrorFeedback(momentum=…)``, clipping is
    ``clip_locally``, the schedule of densities ``WarmUp``.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, section 5. Differs from the paper: the sample is strided
    instead of random, so that the choice is deterministic. For exactly k, ``TopK`` is as fast. Stateless.

    Args:
        density: The share of elements to send, 0 < density ≤ 1.
        sample: The share of elements to look at, 0 < sample ≤ 1.

    Raises:
        TypeError: One of them is no number.
        ValueError: One of them is out of range.
    """

    def __init__(self, density: float = 0.001, *, sample: float = 0.01) -> None:
        super().__init__(density)
        self.sample = share_of(sample, "sample", expected="the fraction of elements to look at")

    def __call__(self, tensor: Tensor) -> SparseVector:
        flat = flatten(tensor)
        k = self.entries(len(flat))
        if not k:
            return topk(flat, 0)
        size = min(len(flat), max(ceil(self.sample * len(flat)), ceil(8 / self.density)))
        seen = flat[:: len(flat) // size].contiguous()
        threshold = topk(seen, self.entries(len(seen))).values.abs().amin()
        return select_at_least(flat, float(threshold), k)


def clip_locally(gradients: Iterable[Tensor | None], max_norm: float, ranks: int) -> Tensor:
    """Scales the gradients in place so that their norm together is at most ``max_norm`` / √ranks.

    Call it before they are accumulated, on every rank by itself: the norm of a sum of ``ranks`` independent gradients
    grows as √ranks, so the sum is clipped to about ``max_norm`` (Lin et al., ICLR 2018, section 3.2).

    Args:
        gradients: Dense tensors of any shapes; None, of a parameter without a gradient, is passed over.
        max_norm: Bound of the norm of the sum over the ranks, > 0.
        ranks: Number of ranks, ≥ 1.

    Returns:
        The norm before, 0-D: of the gradients' dtype, float32 for float16; float64 where a sum of squares overflows.

    Raises:
        TypeError: One tensor was given in place of several, or another argument is no number.
        ValueError: max_norm or ranks is out of range.
    """
    if isinstance(gradients, Tensor):
        raise TypeError("gradients is a tensor, whose rows would be taken for gradients: give [tensor]")
    max_norm = positive(max_norm, "max_norm", expected="the norm of the sum over ranks")
    ranks = integer(ranks, "ranks", least=1, expected="the number of ranks")
    present = [gradient for gradient in gradients if gradient is not None]
    norm = _norm(present)
    scale = (max_norm * ranks**-0.5 / (norm + 1e-6)).clamp(max=1.0)
    for gradient in present:
        gradient.mul_(scale.to(gradient.device))
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    """Norm of all together; again in float64, several times slower, where it overflows and all would become zero."""
    given = [gradient for gradient in gradients if gradient.dtype != torch.float16]
    if short := [gradient for gradient in gradients if gradient.dtype == torch.float16]:
        given += torch._foreach_norm(short, dtype=torch.float32)
    norm = torch.nn.utils.get_total_norm(given)
    if norm.isfinite():
        return norm
    return torch.nn.utils.get_total_norm(
        [torch.linalg.vector_norm(gradient.abs(), dtype=torch.float64) for gradient in gradients]
    )
