"""Settings of an optimizer's parameter groups, which shape an update beside the gradient: rates, momenta, decays."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_HOW = ("foreach", "fused", "differentiable", "capturable")


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of all parameter groups, as plain values; "initial_lr" is a scheduler's."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names", "initial_lr")
        }
        for group in optimizer.param_groups
    ]


def shared_settings(optimizer: Optimizer) -> str:
    """Settings that ranks must share, as a fact: numbers and texts, without how a step is computed ("foreach", …)."""
    plain = (int, float, str, tuple, list)
    groups = [
        ", ".join(f"{name} {v}" for name, v in group.items() if name not in _HOW and isinstance(v, plain) and v)
        for group in settings_of(optimizer)
    ]
    return f"parameter groups of {'; '.join(groups)}"
