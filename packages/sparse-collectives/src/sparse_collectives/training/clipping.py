"""Clipping before the exchange: each rank's own gradient, so that what is left out of a step is never scaled later.

After a sparse exchange `p.grad` holds what many steps have saved up for the few entries that were sent. Its norm is
large by construction, and clipping it throws away what the residuals no longer hold.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sparse_collectives.training.gradients import part_of


def check_clip_norm(clip_norm: Any) -> float | None:
    """TypeError for what is no number, ValueError unless it is positive and finite; None: no clipping."""
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, Real):
        raise TypeError(f"clip_norm is {clip_norm!r}, expected a norm such as 1.0, or None")
    if not 0 < float(clip_norm) < math.inf:
        raise ValueError(f"clip_norm is {clip_norm}, expected a norm above 0, or None")
    return float(clip_norm)


def clip_limit(clip_norm: float, ranks: int) -> float:
    """What one rank's own gradient is held to, so that the mean over ranks is held to about `clip_norm`: that · √P.

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


class ClippingAfter:
    """Sees gradients that are scaled down between a sparse exchange and the step, and says once what that does.

    Looks at the first steps only, two passes over the gradients each. owner: what takes clip_norm=.
    """

    def __init__(self, owner: str, steps: int = 50) -> None:
        self._owner, self._left = owner, steps
        self._before: Tensor | None = None

    def note(self, norm: Tensor) -> None:
        """Of all gradients, as the exchange left them."""
        self._before = norm

    def look(self, parameters: Sequence[Tensor]) -> bool:
        """The gradients as the step takes them; whether there is more to be seen."""
        before, self._before = self._before, None
        if before is None or self._left <= 0:
            return self._left > 0
        self._left -= 1
        if float(norm_of(parameters)) < 0.999 * float(before):
            self._left = 0
            warnings.warn(AFTER.format(owner=self._owner), stacklevel=6)
        return self._left > 0


def norm_of(parameters: Sequence[Tensor]) -> Tensor:
    """Of all their gradients together; of sharded ones this rank's parts."""
    return torch.nn.utils.get_total_norm([part_of(p.grad) for p in parameters if p.grad is not None])


AFTER = (
    "the gradients were scaled down between the exchange and step(). After a sparse exchange p.grad holds what the few "
    "entries that were sent had saved up, and what clipping takes of that is in no residual: it is lost, and training "
    "slows down. Clip before the exchange instead: {owner}(..., clip_norm=...), and leave the call out"
)
