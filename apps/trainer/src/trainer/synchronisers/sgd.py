"""SGD as the common flags describe it."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

from trainer.command_line.options import Options


def plain_sgd(options: Options, model: nn.Module) -> SGD:
    """With its own momentum; what wraps it decides whether gradients are exchanged before it, or models after it."""
    return SGD(
        model.parameters(),
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
    )
