"""Settings of an optimizer's parameter groups, which shape an update beside the gradient: rates, momenta, decays."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from communicators.communicator import Communicator, run
from communicators.dense_schedules import barrier

_HOW = ("foreach", "fused", "differentiable", "capturable")


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of all parameter groups, as plain values; "initial_lr" is a scheduler's."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names", "initial_lr")
        }
        for group in optimizer.param_groups
    ]


def refuse_unlike_settings(optimizer: Optimizer, comm: Communicator, *, what: str) -> None:
    """Raises CollectiveError, on every rank, where they differ: steps by unlike ones part the ranks' parameters.

    For every rank to call. ⌈log P⌉ messages without a body; numbers and texts are compared, and not how a step is
    computed ("foreach" and its like).
    """
    if comm.size == 1:
        return
    plain = (int, float, str, tuple, list)
    groups = [
        ", ".join(f"{name} {v}" for name, v in group.items() if name not in _HOW and isinstance(v, plain) and v)
        for group in settings_of(optimizer)
    ]
    run(barrier(comm.rank, comm.size), comm, facts=f"{what} with parameter groups of {'; '.join(groups)}")
