"""Settings of an optimizer's parameter groups, which shape an update beside the gradient: rates, momenta, decays."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

SHARED = ("lr", "momentum", "betas", "weight_decay")
"""Settings that all ranks share, whatever else an optimizer keeps in its groups: some keep values that they adapt."""


def shared_settings(optimizer: Optimizer) -> str:
    """`SHARED` settings of all parameter groups, as a fact."""
    groups = [
        ", ".join(f"{name} {_said(group[name])}" for name in SHARED if group.get(name))
        for group in optimizer.param_groups
    ]
    return f"parameter groups of {'; '.join(groups)}"


def _said(value: Any) -> str:
    """Numbers alone: a tensor's representation rounds, and names its device."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_said, value))})"
    return repr(value.tolist() if isinstance(value, Tensor) else value)
