"""The optimizer behind DDP, which a hook is never told of: seen at its first steps, so that a bad match is said."""

from __future__ import annotations

import torch
from communicators import Bucket
from torch import Tensor
from torch.optim import Optimizer

from sparse_collectives.training.clipping import ClippingAfter
from sparse_collectives.training.ddp.buckets import Buckets
from sparse_collectives.training.step_watch import watch
from sparse_collectives.training.unfit import UNDER_DDP, warn_of


class SeenOptimizer:
    """Looks at the first steps of the optimizer that holds the parameters which DDP brings; then no longer.

    Nothing is looked at before a selection has been exchanged (`note`). scaled: gradients are, so that their norms tell
    nothing of clipping.
    """

    def __init__(self, buckets: Buckets, *, momentum: float, density: float, scaled: bool) -> None:
        self._buckets, self._momentum, self._density = buckets, momentum, density
        self._clipping = None if scaled else ClippingAfter("SparseHookState")
        self._squares: dict[tuple[int, ...], Tensor] = {}  # of the means as the exchange gave them, by bucket
        self._introduced, self._looks = False, True
        watch(self)

    def note(self, bucket: Bucket, given: Tensor) -> None:
        """What DDP is given for a bucket."""
        if self._looks:
            norm = torch.zeros(()) if self._clipping is None else torch.linalg.vector_norm(given, dtype=torch.float64)
            self._squares[bucket.members] = norm.square().detach()

    def look(self, optimizer: Optimizer) -> bool:
        """At an optimizer that has stepped, and left gradients as it took them; whether there is more to be seen."""
        known = list(self._buckets.parameters.values())
        ids = {id(p) for p in known}
        if not self._squares or not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            return True
        if not self._introduced:
            self._introduced = True
            warn_of(optimizer, momentum=self._momentum, density=self._density, behind=UNDER_DDP, stacklevel=6)
        if self._clipping is None:
            self._looks = False
            return False
        first = next(iter(self._squares.values()))
        self._clipping.note(torch.stack([square.to(first.device) for square in self._squares.values()]).sum().sqrt())
        self._squares = {}
        self._looks = self._clipping.look(known)
        return self._looks
