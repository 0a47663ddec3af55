"""Gradients that have accumulated on a rank, and are taken by a round as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Taken:
    """Deposits that a round has taken; tensors is None where there were none."""

    tensors: list[Tensor] | None
    count: int
    weight: float
    finite: bool


class Deposits:
    """acc ← acc + weight · gradient; nothing is ever overwritten. The caller holds a lock.

    like: 1-D tensors that say size and dtype.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.like = list(like)
        self.count, self.weight, self.finite = 0, 0.0, True
        self._acc: list[Tensor] | None = None

    def add(self, tensors: Sequence[Tensor], weight: float, finite: bool) -> None:
        """Adds a deposit. tensors: weighted already, and nobody else's from now on."""
        if self._acc is None:
            self._acc = list(tensors)
        else:
            for acc, tensor in zip(self._acc, tensors, strict=True):
                acc += tensor
        self.count, self.weight, self.finite = self.count + 1, self.weight + weight, self.finite and finite

    def take(self) -> Taken:
        """Takes all of it."""
        taken = Taken(self._acc, self.count, self.weight, self.finite)
        self._acc, self.count, self.weight, self.finite = None, 0, 0.0, True
        return taken

    def put_back(self, taken: Taken) -> None:
        """Puts back what a round has not used after all."""
        if taken.tensors is not None:
            self.add(taken.tensors, taken.weight, taken.finite)
            self.count += taken.count - 1

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; zeros where there is nothing, so that it always has the same tensors."""
        acc = [torch.zeros_like(one) for one in self.like] if self._acc is None else [acc.clone() for acc in self._acc]
        return {"acc": acc, "count": self.count, "weight": self.weight, "finite": self.finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` gave."""
        self.count, self.weight, self.finite = state["count"], state["weight"], state["finite"]
        self._acc = [acc.clone() for acc in state["acc"]] if self.count else None


def weighted_copy(tensors: Sequence[Tensor], weight: float) -> tuple[list[Tensor], bool]:
    """weight · tensors as 1-D copies in host memory, and whether all of it is finite."""
    copies = [tensor.detach().reshape(-1).to("cpu", copy=True) for tensor in tensors]
    if weight != 1.0:
        copies = [copy.mul_(weight) for copy in copies]
    finite = all(bool(torch.isfinite(copy.sum())) or bool(torch.isfinite(copy).all()) for copy in copies)
    return copies, finite
