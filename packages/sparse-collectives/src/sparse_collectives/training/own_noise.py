"""What the noise of a rank's own gradient does to Adam's steps, made good in part.

A rank's own gradient is μ + σ·noise, the mean over P ranks μ + σ/√P·noise. Adam divides by the root of the second
moment, μ² + σ² of the one and μ² + σ²/P of the other. So where ranks step by their own moments, the mean of their steps
is shorter than the step by the mean gradient, by

    √(f + (1 − f)/P),  f = μ² / (μ² + σ²),

up to √P. f is found in the moments themselves. The first is a mean over steps, in which noise cancels as it does over
ranks: with bias correction E[m²] = μ² + b·σ² and E[v] = μ² + σ², b = (1 − β₁)/(1 + β₁) · (1 + β₁ᵗ)/(1 − β₁ᵗ), so that
f = (Σm²/Σv − b)/(1 − b), of each tensor.

That is the least that f can be. What turns round from step to step on all ranks alike, as gradients do across a steep
valley, cancels over steps and not over ranks, and is taken for noise: in a transformer's training on text f came out as
0 to 0.1 where two ranks' gradients, compared, gave 0 to 0.6. 1 is the most. Steps are lengthened by the geometric mean
of what the two ask for, (f + (1 − f)/P)^(−¼).

It holds where ranks draw their samples independently: whose gradients are alike on all ranks would be given steps that
are up to P^(1/4) too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CORRECTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)
"""Their steps are m/√v, or nearly."""
LINEAR = (torch.optim.SGD, torch.optim.ASGD)
"""The mean of their steps is the step by the mean gradient."""


def knows(optimizer: Optimizer) -> bool:
    """Whether the mean of its steps by ranks' own gradients is about as long as its step by the mean gradient.

    Not of an Adam with β₁ = 0, which has no mean over steps.
    """
    if isinstance(optimizer, CORRECTED):
        return all(group["betas"][0] for group in optimizer.param_groups)
    return isinstance(optimizer, LINEAR)


def ahead_by(optimizer: Optimizer, ranks: int) -> float:
    """a of `Ahead`: 1 of what is linear in the gradient, else 1/P."""
    return 1.0 if isinstance(optimizer, LINEAR) else 1 / ranks


@torch.no_grad()
def lengthen(optimizer: Optimizer, updates: Mapping[Tensor, Tensor], ranks: int) -> None:
    """Multiplies by (f + (1 − f)/P)^(−¼), in place, what an Adam has just added to each parameter.

    Decoupled weight decay is as long on one rank as on many, and stays; but of parameters of 16 bits, in which most of
    it is rounded off, so that what is left of it is not known. Other optimizers, and one rank, are left as they are.
    updates: by parameter; the parameters are where they were before that step.
    """
    if ranks == 1 or not isinstance(optimizer, CORRECTED):
        return
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        decay = group["lr"] * group["weight_decay"] if decoupled else 0.0
        for p in group["params"]:
            if p.grad is None or p not in updates:
                continue
            signal = signal_share(optimizer.state[p], *group["betas"])
            factor = (signal + (1 - signal) / ranks) ** -0.25
            update = updates[p]
            adapted = update + decay * p if decay and p.dtype.itemsize > 2 else update
            update += (factor - 1).to(update.dtype) * adapted


def signal_share(state: Mapping[str, Any], beta1: float, beta2: float) -> Tensor:
    """f of one tensor, between 0 and 1, from an Adam's state after step t; 1 where b is, at t = 1 and with β₁ = 0."""
    m, v = (state[name].to(torch.promote_types(state[name].dtype, torch.float32)) for name in ("exp_avg", "exp_avg_sq"))
    step = torch.as_tensor(state["step"], dtype=torch.float32, device=m.device)
    b = (1 - beta1) / (1 + beta1) * (1 + beta1**step) / (1 - beta1**step)
    squares = torch.linalg.vector_norm(m).square() / (1 - beta1**step) ** 2
    ratio = squares / (v.sum() / (1 - beta2**step))
    found = torch.where((step > 1) & (b < 1), (ratio - b) / (1 - b), torch.ones_like(ratio))
    return found.nan_to_num(nan=1.0).clamp(0, 1)
