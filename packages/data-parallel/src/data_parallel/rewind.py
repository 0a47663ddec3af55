"""Restores a wrapped optimizer's state from before a step that is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def remembered(optimizer: Optimizer) -> Callable[[], None]:
    """Function that restores, bit for bit, the optimizer's present state and its groups' settings.

    Writes into the same tensors, each time that it is called. An optimizer's own attributes are not restored. Memory: a
    copy of the state.
    """
    state = {p: _copied(kept) for p, kept in optimizer.state.items()}
    groups = [_copied({name: v for name, v in group.items() if name != "params"}) for group in optimizer.param_groups]

    def bring_back() -> None:
        optimizer.state.clear()
        optimizer.state.update({p: _restored(kept) for p, kept in state.items()})
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(_restored(kept))

    return bring_back


def _copied(kept: Any) -> dict[str, tuple[Any, Any]]:
    """Each object by name, with a copy of its content."""
    return {name: (v, v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v)) for name, v in kept.items()}


def _restored(kept: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {
        name: v.copy_(before) if isinstance(v, Tensor) else copy.deepcopy(before) for name, (v, before) in kept.items()
    }
