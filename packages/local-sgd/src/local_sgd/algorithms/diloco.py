"""DiLoCo, distributed low-communication training (Douillard et al., 2023)."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.block import Every
from local_sgd.options import Options
from local_sgd.parts import Part
from local_sgd.periodic import PeriodicAveraging
from local_sgd.settings import below_one, positive


class DiLoCo(PeriodicAveraging):
    """What hundreds of steps changed is one gradient of an outer SGD with Nesterov momentum.

        Δ = z − x̄
        v ← β·v + Δ
        z ← z − η·(Δ + β·v)
        x ← z                                                          every τ steps

    The same bits as torch.optim.SGD(lr=η, momentum=β, nesterov=True) given Δ as gradient. The model is z.

    outer_rate: η > 0.  momentum: 0 ≤ β < 1.
    optimizer: the inner one, AdamW in the paper.  sync_every (τ), options: see `PeriodicAveraging`.
    """

    anchors = ("anchor",)
    momenta = ("momentum",)
    settings = ("outer_rate", "momentum")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 500,
        outer_rate: float = 0.7,
        momentum: float = 0.9,
        **options: Unpack[Options],
    ) -> None:
        self.outer_rate, self.momentum = positive("outer_rate", outer_rate), below_one("momentum", momentum)
        super().__init__(optimizer, sync_every=sync_every, **options)

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """See `PeriodicAveraging.boundary`."""
        z, v, η, β = part["anchor"], part["momentum"], self.outer_rate, self.momentum
        delta = z - mean
        v.mul_(β).add_(delta)
        return z.add_(delta.add(v, alpha=β), alpha=-η)
