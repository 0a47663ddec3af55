"""Policy for the inner optimizer's state, such as momentum, at a boundary."""

from __future__ import annotations

import torch
from communicators import Communicator
from replicas import average_tensors, foreseen_state
from torch import Tensor
from torch.optim import Optimizer


class InnerState:
    """Applies a policy: "keep", every rank its own; "average" of what has a parameter's shape; "reset" to nothing.

    The averaged entries are those that a step makes, known beforehand, so that a rank on which a parameter has no state
    yet takes part: its zeros count, and it gets nothing. Step counters and the like stay each rank's own.
    """

    def __init__(self, policy: str, optimizer: Optimizer, comm: Communicator, what: str) -> None:
        self._policy, self._optimizer, self._comm, self._what = policy, optimizer, comm, what
        self._entries = self._foreseen() if policy == "average" else []

    def at_boundary(self) -> None:
        """Applies the policy; every rank calls it."""
        if self._policy == "reset":
            self._optimizer.state.clear()
        elif self._policy == "average":
            self._average()

    def _average(self) -> None:
        state = self._optimizer.state
        if state and not self._entries:
            raise ValueError(
                f"inner_state='average': what {type(self._optimizer).__name__} keeps cannot be told before a step, or "
                "has not its parameters' shapes: take 'keep' or 'reset'"
            )
        tensors = []
        for p, name in self._entries:
            held = state[p].get(name) if p in state else None
            tensors.append(held if isinstance(held, Tensor) else torch.zeros_like(p))
        average_tensors(tensors, self._comm, facts=f"inner state of {self._what}")

    def _foreseen(self) -> list[tuple[Tensor, str]]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = foreseen_state(self._optimizer)
        return [
            (p, name)
            for position, p in enumerate(parameters)
            for name, held in state.get(position, {}).items()
            if isinstance(held, Tensor) and held.shape == p.shape and held.is_floating_point() and name != "step"
        ]
