"""Updates of the wrapped optimizer from this rank's own gradients, exchanged in place of the gradients.

An adaptive optimizer divides by the size of its input, which comes in bursts from a sparse exchange: an entry that is
sent every T steps brings T gradients at once, its second moment is T times that of dense gradients, and its steps are
√T times too short. So the optimizer runs before the selection, on the rank's own dense gradients, and its updates of
the parameters are selected from, with error feedback (as in SparseLoCo, Sarfi et al. 2025, with an
exchange after every step, and without its decay of the residuals, which would lose a part of them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sparse_compress import all_finite
from torch import Tensor
from torch.optim import Optimizer


def taken(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Takes the optimizer's step with this rank's gradients, and undoes it: what it added to each parameter.

    The optimizer's own state has taken the step. Where a gradient is not finite it has not: updates are zeros then, and
    NaN at the elements in question, whatever the optimizer would make of them.
    """
    if not _are_finite(parameters):
        return [_only_nonfinite(p) for p in parameters]
    with torch.no_grad():
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
        updates = [p - old for p, old in zip(parameters, before, strict=True)]
        torch._foreach_copy_(list(parameters), before)
    return updates


def _are_finite(parameters: Sequence[Tensor]) -> bool:
    """Whether every gradient of this rank is finite."""
    flags = [all_finite(p.grad) for p in parameters if p.grad is not None]
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())  # one look at a GPU


def _only_nonfinite(p: Tensor) -> Tensor:
    update = torch.zeros_like(p, requires_grad=False)
    return update if p.grad is None else update.masked_fill_(~p.grad.isfinite(), torch.nan)


def mean_of_states(states: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """The wrapped optimizers' state by parameter, each rank's own: their mean, for ranks of another number."""
    merged: dict[Any, Any] = {}
    for state in states:
        for parameter, kept in state.items():
            for name, value in kept.items():
                merged.setdefault(parameter, {}).setdefault(name, []).append(value)
    return {p: {name: _mean(values) for name, values in kept.items()} for p, kept in merged.items()}


def _mean(values: Sequence[Any]) -> Any:
    """Mean of tensors; a counter, which is the same on all ranks, stays as it is."""
    first = values[0]
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.dim() == 0:
        return first
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    for value in values:
        total += value.to(total.device)
    return (total / len(values)).to(first.dtype)
