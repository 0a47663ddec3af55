"""Means over ranks of the inner optimizer's state, such as momentum."""

import torch
from communicators import Communicator
from replicas import average_tensors, foreseen_state
from torch import Tensor
from torch.optim import Optimizer


def averaged_entries(optimizer: Optimizer) -> list[tuple[Tensor, str]]:
    """Parameters, and names of what is kept of each in its shape.

    They are those that a step makes, known beforehand, so that a rank on which a parameter has no state yet takes part:
    its zeros count, and it gets nothing. Step counters and the like stay each rank's own.

    Raises ValueError for other tensors, such as factors of a moment, or bytes: their mean may be of no use.
    """
    parameters, state = [p for group in optimizer.param_groups for p in group["params"]], foreseen_state(optimizer)
    kept = [
        (p, name, held)
        for position, p in enumerate(parameters)
        for name, held in state.get(position, {}).items()
        if isinstance(held, Tensor) and (held.shape == p.shape or held.numel() > 1) and name != "step"
    ]
    if other := sorted({name for p, name, held in kept if held.shape != p.shape or not held.is_floating_point()}):
        raise ValueError(
            f"inner_state='average': {type(optimizer).__name__} keeps {other}, which have not its parameters' shapes, "
            "or are not floating-point: take 'keep' or 'reset'"
        )
    return [(p, name) for p, name, _ in kept]


def average_inner_state(
    optimizer: Optimizer, entries: list[tuple[Tensor, str]], comm: Communicator, *, facts: str, counts: bool
) -> None:
    """Averages these entries of the state; every rank calls it. counts: whether this rank's count."""
    state = optimizer.state
    if state and not entries:
        raise ValueError(
            f"inner_state='average': what {type(optimizer).__name__} keeps cannot be told before a step: "
            "take 'keep' or 'reset'"
        )
    tensors = []
    for p, name in entries:
        held = state[p].get(name) if p in state else None
        tensors.append(held if isinstance(held, Tensor) else torch.zeros_like(p))
    average_tensors(tensors, comm, facts=facts, counts=counts)
