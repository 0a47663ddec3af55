"""Policies for the inner optimizer's state, such as momentum, at a boundary."""

from collections.abc import Callable
from functools import partial

import torch
from communicators import Communicator
from replicas import average_tensors, foreseen_state
from torch import Tensor
from torch.optim import Optimizer


def inner_state(policy: str, optimizer: Optimizer, comm: Communicator, what: str) -> Callable[[bool], None]:
    """Policy as a function that every rank calls at a boundary, with whether its own state counts in means.

    policy: "keep" as it is; "reset" to nothing; "average" of what has a parameter's shape. The averaged entries are
    those that a step makes, known beforehand, so that a rank on which a parameter has no state yet takes part: its
    zeros count, and it gets nothing. Step counters and the like stay each rank's own.
    """
    if policy != "average":
        return (lambda _: optimizer.state.clear()) if policy == "reset" else (lambda _: None)
    parameters, state = [p for group in optimizer.param_groups for p in group["params"]], foreseen_state(optimizer)
    entries = [
        (p, name)
        for position, p in enumerate(parameters)
        for name, held in state.get(position, {}).items()
        if isinstance(held, Tensor) and held.shape == p.shape and held.is_floating_point() and name != "step"
    ]
    return partial(_average, optimizer, entries, comm, f"inner state of {what}")


def _average(
    optimizer: Optimizer, entries: list[tuple[Tensor, str]], comm: Communicator, facts: str, counts: bool
) -> None:
    state = optimizer.state
    if state and not entries:
        raise ValueError(
            f"inner_state='average': what {type(optimizer).__name__} keeps cannot be told before a step, or "
            "has not its parameters' shapes: take 'keep' or 'reset'"
        )
    tensors = []
    for p, name in entries:
        held = state[p].get(name) if p in state else None
        tensors.append(held if isinstance(held, Tensor) else torch.zeros_like(p))
    average_tensors(tensors, comm, facts=facts, counts=counts)
