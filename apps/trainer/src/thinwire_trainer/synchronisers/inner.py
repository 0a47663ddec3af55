"""The optimizer as the common flags describe it: SGD, or AdamW."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire_trainer.command_line.options import Options


def inner_optimizer(options: Options, model: nn.Module) -> Optimizer:
    """With its own moments; what wraps it decides whether gradients are exchanged before it, or models after."""
    if options.optimizer == "adamw":
        return adamw(options, model)
    return SGD(
        model.parameters(),
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
    )


def adamw(options: Options, model: nn.Module) -> AdamW:
    """Its momentum is β₁; β₂ is torch's 0.999."""
    betas = options.momentum, 0.999
    return AdamW(model.parameters(), lr=options.lr, betas=betas, weight_decay=options.weight_decay)
