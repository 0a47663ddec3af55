"""A hook that was never registered: said, because frameworks ignore one without a word, and train on without it."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable

from replicas import default_group
from torch import Tensor
from torch.optim import Optimizer

from data_parallel.step_watch import unwatch, watch

PATIENCE = 20
"""Steps of any optimizers, where it is not known whose parameters they should be."""


class RegistrationWatch:
    """Looks at optimizers that step until DDP has brought the first bucket: then the hook is registered.

    parameters: of the module; none: not known. state: whose; None: a copy's, which DDP keeps beside its own copy, but
    registers nowhere, so that only parameters can tell.
    """

    def __init__(self, parameters: Iterable[Tensor], *, state: object | None) -> None:
        self._ids, self._steps = {id(p) for p in parameters}, 0
        self._state = None if state is None else weakref.ref(state)
        if self._ids or state is not None:
            watch(self)

    def end(self) -> None:
        """Stops watching."""
        unwatch(self)

    def look(self, optimizer: Optimizer) -> None:
        """Checks an optimizer that has stepped: its closure may have run backward."""
        group = default_group()
        if group is None or group.size() == 1:
            return
        self._steps += 1
        held = any(id(p) in self._ids for its in optimizer.param_groups for p in its["params"])
        if not held and (self._ids or self._steps < PATIENCE):
            return
        self.end()
        if self._state is None or not is_registered(self._state()):
            warnings.warn(SAID.format(size=group.size()), stacklevel=4)


def is_registered(state: object) -> bool:
    """Whether a DDP module has been given it: DDP keeps (hook, state), and the state cannot see DDP.

    Looks through all that is alive, which takes a tenth of a second: for once in a training.
    """
    kept = [one for one in gc.get_referrers(state) if isinstance(one, tuple) and len(one) == 2]
    return any(callable(hook) and given is state for hook, given in kept)


SAID = (
    "an optimizer takes steps among {size} ranks, but DDP has brought no gradient to this SparseHookState: the hook is "
    "not registered, and gradients are exchanged whole, if at all. Call ddp.register_comm_hook(state, sparse_hook); "
    "Lightning does so on CUDA only, Accelerate only with hooks of its own: there take data_parallel.integrations"
)
