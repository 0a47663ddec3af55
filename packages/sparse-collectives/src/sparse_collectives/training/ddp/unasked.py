"""A hook that was never registered: said, because frameworks ignore one without a word, and train on without it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from communicators.replicas.default_group import default_group
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

PATIENCE = 20
"""Steps of any optimizers, where it is not known whose parameters they should be."""


class Unasked:
    """Looks at optimizers that step until DDP has brought the first bucket.

    parameters: of the module; none: not known.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._ids, self._steps = {id(p) for p in parameters}, 0
        self._watch: Any = register_optimizer_step_post_hook(_seen_by(weakref.ref(self)))

    def end(self) -> None:
        """Looks no longer."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def look(self, optimizer: Optimizer) -> None:
        """At an optimizer that has stepped: its closure may have been what ran backward."""
        group = default_group()
        if group is None or group.size() == 1:
            return
        self._steps += 1
        held = any(id(p) in self._ids for its in optimizer.param_groups for p in its["params"])
        if held or (not self._ids and self._steps >= PATIENCE):
            self.end()
            warnings.warn(SAID.format(size=group.size()), stacklevel=5)


def _seen_by(seeing: weakref.ref[Unasked]) -> Any:
    def look(optimizer: Optimizer, *given: Any) -> None:
        del given
        living = seeing()
        if living is not None:
            living.look(optimizer)

    return look


SAID = (
    "an optimizer takes steps among {size} ranks, but DDP has brought no gradient to this SparseHookState: the hook is "
    "not registered, and gradients are exchanged whole, if at all. Call ddp.register_comm_hook(state, sparse_hook); "
    "Lightning does so on CUDA only, Accelerate only with hooks of its own: there take sparse_collectives.integrations"
)
