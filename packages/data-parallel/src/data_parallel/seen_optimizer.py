"""The optimizer behind a sparse exchange, looked at now and then as long as training runs: a bad match is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from data_parallel.gradients import part_of
from data_parallel.step_watch import watch
from data_parallel.steps import Steps

EVERY = 7
"""Steps from one look to the next, which takes two passes over the gradients, and waits for a GPU."""

CLIPPED = (
    "the gradients were scaled down between the exchange and step(). After a sparse exchange p.grad holds what the few "
    "entries that were sent had saved up, and what clipping takes of that is in no residual: it is lost, and training "
    "slows down. Clip before the exchange instead: {owner}(..., clip_norm=...), and leave the call out"
)


class SeenOptimizer:
    """Compares the gradients that an optimizer has stepped with to those that the exchange gave, and judges it.

    Args:
        steps: The training's steps; every `EVERY`-th is checked.
        judge: Returns a warning about an optimizer, None if there is none.
        owner: The class that takes clip_norm=. None: gradients are scaled for a GradScaler, so norms tell nothing.
    """

    def __init__(self, steps: Steps, judge: Callable[[Optimizer], str | None], *, owner: str | None) -> None:
        self._steps, self._judge, self._owner = steps, judge, owner
        self._given: dict[Tensor, Tensor | None] = {}  # parameter -> norm of its gradient; None: not to be compared
        self._said: set[str] = set()
        watch(self)

    def note(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Gradients as the exchange gives them; again for a backward that adds to them."""
        if self._steps.taken % EVERY != 1:
            self._given.clear()  # of a step that was never taken
            return
        compares = self._owner is not None and self._steps.selects_from(sum(p.numel() for p in parameters))
        self._given.update(zip(parameters, _norms(gradients) if compares else [None] * len(gradients), strict=True))

    def look(self, optimizer: Optimizer) -> None:
        """Checks an optimizer that has stepped, and left its gradients in place."""
        if not self._given:
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if p in self._given]
        if not held:
            return
        self.say(self._judge(optimizer), stacklevel=5)
        noted = [(p.grad, norm) for p in held if (norm := self._given.pop(p)) is not None and p.grad is not None]
        if noted and _shrunk([norm for _, norm in noted], _norms([part_of(gradient) for gradient, _ in noted])):
            self.say(CLIPPED.format(owner=self._owner), stacklevel=5)

    def say(self, text: str | None, *, stacklevel: int) -> None:
        """Issues a UserWarning, unless it was issued before."""
        if text is not None and text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=stacklevel)


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]


def _shrunk(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether the norm of all together did; without those that were zeroed, as of a layer that must not learn."""
    given, taken = (
        torch.stack([norm.to(after[0].device, torch.float64) for norm in norms]) for norms in (before, after)
    )
    return bool(taken.norm() < 0.999 * (given * (taken > 0)).norm())
