"""The optimizer of a sharded model, which nobody tells of: seen at its first step, so that a bad match is said."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from sparse_collectives.training.step_watch import watch
from sparse_collectives.training.unfit import UNDER_FSDP, warn_of


class SeenOptimizer:
    """Looks at the first step of an optimizer that holds one of these parameters."""

    def __init__(self, parameters: Iterable[Tensor], *, momentum: float, density: float) -> None:
        self._ids = {id(p) for p in parameters}
        self._momentum, self._density = momentum, density
        watch(self)

    def look(self, optimizer: Optimizer) -> bool:
        """At an optimizer that has stepped; whether there is more to be seen."""
        if not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            return True
        warn_of(optimizer, momentum=self._momentum, density=self._density, behind=UNDER_FSDP, stacklevel=5)
        return False
