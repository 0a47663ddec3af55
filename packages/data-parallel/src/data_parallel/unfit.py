"""Combinations of an exchange and an optimizer that were measured to learn badly."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from data_parallel.adam_step_correction import knows

TWICE = (
    "momentum is on twice: before the selection (momentum=) and in the {optimizer}, after it, where it repeats the few "
    "entries that were sent; training may not learn at all: leave the {optimizer}'s at 0"
)
CYCLED = ". OneCycleLR and CyclicLR set it, unless they are given cycle_momentum=False"
ADAPTIVE_TWICE = (
    "momentum= and {name}, which has one of its own: it learns worse than with either alone. {instead}, and leave "
    "momentum= out"
)
ADAPTIVE = (
    "{name} behind a sparse exchange: it sees few entries at a time, each with what many steps have saved up, and "
    "takes them for noise, so it learns more slowly than with dense gradients. {instead}"
)
ENOUGH = 0.1
"""Of the entries: with so many Adam was half a point of accuracy behind dense, with a tenth of them six."""
INSTEAD = 'Give sends="updates" and make gradients inside `with optimizer.ahead():`'
UNDER_DDP = (
    'A DDP hook sees gradients only: use DistributedOptimizer(..., sends="updates") without DDP, or '
    'algorithm="dense-int8" here, which was as accurate as dense with AdamW, as bf16_compress_hook of torch was; '
    '"powersgd" was up to two points behind'
)

SHORTER = (
    "where {name} divides by the size of its gradients, as all but SGD do, its steps on {ranks} ranks are up to "
    "{times:.1f} times too short, since a rank's own gradients are noisier than their mean. That is made good for "
    "Adam, AdamW, NAdam and RMSprop alone: take one of these, or a higher learning rate"
)
UNDER_FSDP = 'sparse_hsdp exchanges gradients only: take SGD with momentum= here, or algorithm="dense"'


def unfit(
    optimizer: Optimizer,
    *,
    momentum: float,
    density: float,
    sends: str = "gradients",
    ranks: int = 1,
    behind: str | None = None,
) -> str | None:
    """Warning, with a remedy, about an optimizer known to learn badly from selections; None for any other.

    behind: the remedy for an optimizer that is not wrapped. density: the final one. Adam alone is warned about only
    below `ENOUGH`. ranks: number of ranks that send updates.
    """
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if sends == "updates":
        return (
            None if ranks == 1 or knows(optimizer) else SHORTER.format(name=name, ranks=ranks, times=math.sqrt(ranks))
        )
    if any("betas" in group for group in groups):
        text = ADAPTIVE_TWICE if momentum else ADAPTIVE
        return text.format(name=name, instead=behind or INSTEAD) if momentum or density < ENOUGH else None
    if not momentum or not any(group.get("momentum", 0) for group in groups):
        return None
    cycled = CYCLED if any("base_momentum" in group for group in groups) else ""
    return TWICE.format(optimizer="optimizer" if behind else "wrapped optimizer") + cycled
