"""Gradients that have accumulated on a rank, and are taken by a round as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor


class Deposits:
    """acc ← acc + weight · gradient; nothing is ever overwritten. The caller holds a lock.

    tensors: acc; None where nothing was deposited. count: number of gradients, without what a rank gives as it meets
    the others. weight: the sum of theirs. finite: whether all were, and acc is. like: 1-D tensors that say size and
    dtype.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.like = list(like)
        self.tensors: list[Tensor] | None = None
        self.count, self.weight, self.finite = 0, 0.0, True

    def add(self, tensors: Sequence[Tensor], weight: float, finite: bool, count: int = 1) -> None:
        """Adds deposits. tensors: weighted already, and nobody else's from now on."""
        if self.tensors is None:
            self.tensors = list(tensors)
        else:
            for acc, tensor in zip(self.tensors, tensors, strict=True):
                acc += tensor
            finite = finite and are_finite(self.tensors)  # halves that are may add to inf
        self.count, self.weight, self.finite = self.count + count, self.weight + weight, self.finite and finite

    def put_back(self, taken: Deposits) -> None:
        """Puts back what a round has not used after all."""
        if taken.tensors is not None:
            self.add(taken.tensors, taken.weight, taken.finite, taken.count)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; zeros where there is nothing, so that it always has the same tensors."""
        acc = [one.clone() for one in self.tensors or map(torch.zeros_like, self.like)]
        return {"acc": acc, "count": self.count, "weight": self.weight, "finite": self.finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` gave."""
        self.count, self.weight, self.finite = state["count"], state["weight"], state["finite"]
        self.tensors = [acc.clone() for acc in state["acc"]] if self.count or self.weight else None


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements are; one sum each where they are."""
    return all(bool(torch.isfinite(one.sum())) or bool(torch.isfinite(one).all()) for one in tensors)


Given: TypeAlias = tuple[list[Tensor], float, bool]
"""1-D tensors in host memory, weighted and nobody else's; their weight, and whether all of them are finite."""


def weighted_copy(tensors: Sequence[Tensor], weight: float) -> Given:
    """weight · tensors as 1-D copies in host memory, with the weight, and whether all of it is finite."""
    copies = [tensor.detach().reshape(-1).to("cpu", copy=True) for tensor in tensors]
    if weight != 1.0:
        copies = [copy.mul_(weight) for copy in copies]
    return copies, float(weight), are_finite(copies)
