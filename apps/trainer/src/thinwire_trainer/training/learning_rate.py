"""The learning rate as a function of the step: linear warm-up times a shape (Goyal et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from thinwire_trainer.command_line.options import Options

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def cosine(progress: float) -> float:
    """Half a cosine, from 1 to 0 (Loshchilov & Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def step(progress: float) -> float:
    """A tenth after half of the run, a hundredth after three quarters (He et al. 2016, CIFAR)."""
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


def milestones(epochs: Sequence[int], *, of: int) -> Callable[[float], float]:
    """A tenth after each of these epochs, of so many."""
    return lambda progress: 0.1 ** sum(progress >= epoch / of for epoch in epochs)


def constant(progress: float) -> float:
    """1 throughout."""
    del progress
    return 1.0


SHAPES: dict[str, Callable[[float], float]] = {"cosine": cosine, "step": step, "constant": constant}


def factor(step: int, *, total_steps: int, warmup_steps: int, shape: Callable[[float], float]) -> float:
    """Factor of the peak rate at step 0 … total_steps − 1.

    The warm-up multiplies the shape; it does not shift it, so that a decay's place does not depend on it.
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    return warmup * shape(min(1.0, step / total_steps))


def rate_schedule(optimizer: Optimizer, options: Options, *, steps_per_epoch: int) -> LambdaLR:
    """A scheduler to be stepped after every optimizer step; its state is part of a checkpoint."""
    from torch.optim.lr_scheduler import LambdaLR

    epochs, drops = options.max_epochs, options.milestones
    total, warmup = epochs * steps_per_epoch, round(options.warmup_epochs * steps_per_epoch)
    curve = milestones(drops, of=epochs) if drops else SHAPES[options.lr_schedule]
    return LambdaLR(optimizer, lambda step: factor(step, total_steps=total, warmup_steps=warmup, shape=curve))
