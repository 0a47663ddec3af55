"""The optimizer behind DDP, which a hook is never told of: seen at its first steps, so that a bad match is said."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from communicators import Bucket
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparse_collectives.training.clipping import ClippingAfter
from sparse_collectives.training.ddp.buckets import Buckets
from sparse_collectives.training.unfit import warn_of


class SeenOptimizer:
    """Looks at the first steps of the optimizer that holds the parameters which DDP brings; then no longer.

    Nothing is looked at before a selection has been exchanged (`note`). scaled: gradients are, so that their norms tell
    nothing of clipping.
    """

    def __init__(self, buckets: Buckets, *, momentum: float, density: float, scaled: bool) -> None:
        self._buckets, self._momentum, self._density = buckets, momentum, density
        self._clipping = None if scaled else ClippingAfter("SparseHookState")
        self._squares: dict[tuple[int, ...], Tensor] = {}  # of the means as the exchange gave them, by bucket
        self._introduced = False
        self._watch: Any = register_optimizer_step_post_hook(_seen_by(weakref.ref(self)))

    def note(self, bucket: Bucket, given: Tensor) -> None:
        """What DDP is given for a bucket."""
        if self._watch is not None:
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
            warn_of(optimizer, momentum=self._momentum, density=self._density, under_ddp=True, stacklevel=6)
        if self._clipping is None:
            return False
        first = next(iter(self._squares.values()))
        self._clipping.note(torch.stack([square.to(first.device) for square in self._squares.values()]).sum().sqrt())
        self._squares = {}
        return self._clipping.look(known)

    def close(self) -> None:
        """Looks no longer."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


def _seen_by(seeing: weakref.ref[SeenOptimizer]) -> Any:
    def look(optimizer: Optimizer, *given: Any) -> None:
        del given
        living = seeing()
        if living is not None and not living.look(optimizer):
            living.close()

    return look
