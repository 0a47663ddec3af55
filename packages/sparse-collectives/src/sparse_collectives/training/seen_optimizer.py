"""The optimizer behind an exchange, which nobody tells of: seen at its first steps, so that a bad match is said."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparse_collectives.training.clipping import ClippingAfter
from sparse_collectives.training.step_watch import watch
from sparse_collectives.training.unfit import warn_of


class SeenOptimizer:
    """Looks at the first steps of the optimizer that holds parameters which are exchanged; then no longer.

    Nothing is looked at before a selection has been exchanged (`note`). parameters: that are known now. behind: what to
    do instead of a bad match. owner: what takes clip_norm=; None: gradients are scaled, so that their norms tell
    nothing of clipping.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[Tensor]],
        *,
        momentum: float,
        density: float,
        behind: str,
        owner: str | None,
    ) -> None:
        self._parameters, self._momentum, self._density, self._behind = parameters, momentum, density, behind
        self._clipping = None if owner is None else ClippingAfter(owner)
        self._squares: dict[Hashable, Tensor] = {}  # of the means as the exchange gave them, by what they are of
        self._introduced, self._looks = False, True
        watch(self)

    def note(self, what: Hashable, given: Tensor) -> None:
        """A part of the gradients, as the exchange gives it."""
        if self._looks:
            norm = torch.zeros(()) if self._clipping is None else torch.linalg.vector_norm(given, dtype=torch.float64)
            self._squares[what] = norm.square().detach()

    def look(self, optimizer: Optimizer) -> bool:
        """At an optimizer that has stepped, and left gradients as it took them; whether there is more to be seen."""
        known = self._parameters()
        ids = {id(p) for p in known}
        if not self._squares or not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            return True
        if not self._introduced:
            self._introduced = True
            warn_of(optimizer, momentum=self._momentum, density=self._density, behind=self._behind, stacklevel=6)
        if self._clipping is None:
            self._looks = False
            return False
        first = next(iter(self._squares.values()))
        self._clipping.note(torch.stack([square.to(first.device) for square in self._squares.values()]).sum().sqrt())
        self._squares = {}
        self._looks = self._clipping.look(known)
        return self._looks
