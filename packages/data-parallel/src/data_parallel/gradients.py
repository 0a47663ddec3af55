"""Gradients of parameters after backward, in the form that an exchange takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients_of(
    parameters: Sequence[Tensor], members: Iterable[int], names: Sequence[str]
) -> dict[int, Tensor | None]:
    """Gradients by member; None where backward has not reached. TypeError names the parameter of a sparse one."""
    gradients = {member: parameters[member].grad for member in members}
    for member, gradient in gradients.items():
        if gradient is not None and gradient.layout != torch.strided:
            raise TypeError(
                f"the gradient of {names[member]!r} has layout {gradient.layout}, expected a dense one: "
                "for an embedding use sparse=False"
            )
    return gradients


def part_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def made(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all parameters; allocates missing ones, uninitialised, to be written to."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.empty_like(p)
    return [p.grad for p in parameters if p.grad is not None]


def unscale(parameters: Sequence[Tensor], scale: Tensor | None, *, overlap: bool, synchronized: bool) -> None:
    """Divides by a GradScaler's scale; None: the user had it unscale the gradients already.

    Raises RuntimeError where scaled ones have been sent already.
    """
    if scale is None:
        return
    if overlap:
        raise RuntimeError(
            "overlap=True sends gradients before a GradScaler hands over its scale: use overlap=False, or "
            "DistributedDataParallel with sparse_hook and its grad_scaler"
        )
    if synchronized:
        raise RuntimeError("synchronize() met scaled gradients: call scaler.unscale_(optimizer) before it")
    for p in parameters:
        if p.grad is not None:
            p.grad.div_(scale.to(p.grad.device))
