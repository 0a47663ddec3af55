"""Mean of the states of wrapped optimizers, each a rank's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


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
