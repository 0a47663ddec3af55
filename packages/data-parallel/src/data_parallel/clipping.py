"""Clipping before the exchange: each rank's own gradient, so that what is left out of a step is never scaled later.

After a sparse exchange `p.grad` holds what many steps have saved up for the few entries that were sent. Its norm is
large by construction, and clipping it throws away what the residuals no longer hold.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def clip_limit(clip_norm: float, ranks: int) -> float:
    """Limit of one rank's own gradient norm that keeps the mean over ranks at about `clip_norm`: clip_norm · √P.

    DGC clips what a rank adds to the mean, its gradient / P, to clip_norm · P^(−1/2) (Lin et al., ICLR 2018, section
    3.2): the norm of a sum of P independent gradients grows as √P. That is clip_norm · √P of the gradient itself.
    """
    return clip_norm * math.sqrt(ranks)


def clip_together(flats: Sequence[Tensor], limit: float) -> None:
    """Scales tensors in place, all by one factor, so that their norm together is at most `limit`.

    What is not finite is left as it is, so that it is found, and named, where the exchange looks for it. A GPU is not
    waited for.
    """
    squares = [torch.linalg.vector_norm(flat, dtype=torch.float64).square() for flat in flats]
    if not squares:
        return
    norm = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    factor = torch.where(norm.isfinite(), (limit / norm).clamp(max=1.0), 1.0)
    for flat in flats:
        flat.mul_(factor.to(flat.device, torch.promote_types(flat.dtype, torch.float32)))
