"""Blockwise model-update filtering (Chen & Huo, ICASSP 2016)."""

import math
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, below_one, positive


@dataclass
class Filter(Rule):
    """Rule of `BMUF`; NaN stands for a default."""

    block_rate: float
    momentum: float
    nesterov: bool
    anchors = ("anchor",)
    momenta = ("momentum",)

    def prepare(self, size: int) -> None:
        """Sets the defaults of η, from the number of ranks, and ζ."""
        if math.isnan(self.momentum):
            self.momentum = min(1 - 1 / size, 0.875)
        if math.isnan(self.block_rate):
            self.block_rate = 1 - self.momentum

    def gain(self) -> float:
        """ζ/(1 − η); 0 without momentum."""
        return self.block_rate / (1 - self.momentum) if self.momentum else 0.0

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Computes z − ζ·g as the point at ζ between z and x̄, so that ζ = 1 gives x̄ bit for bit."""
        z, d, ζ, η = part["anchor"], part["momentum"], self.block_rate, self.momentum
        filtered = d.mul(η).add_(z - mean, alpha=ζ)
        z.lerp_(mean, ζ).sub_(filtered if self.nesterov else d, alpha=η)
        d.copy_(filtered)
        return z


class BMUF(PeriodicAveraging):
    """Filters the change of a block by momentum before all ranks go on from it.

        g = z − x̄
        d ← η·d + ζ·g
        z ← z − (ζ·g + η·d)            nesterov=False: z ← z − d
        x ← z                                                          every τ steps

    A steady change is multiplied by ζ/(1 − η), on top of the factor of the inner SGD's own momentum. So ζ is 1 − η by
    default, and the learning rate means the same as without BMUF. With the paper's ζ = 1, η = 1 − 1/P gives P ranks
    that share the data the step of one rank that sees all of it. BMUF(block_rate=1, momentum=0) is LocalSGD; with
    Nesterov's form it is DiLoCo of outer rate ζ and momentum η; without it, SlowMo at a constant rate. The model is z.

    Args:
        optimizer: See `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        block_rate: ζ > 0, default 1 − η.
        momentum: 0 ≤ η < 1, default 1 − 1/P, and 0.875 for more than 8 ranks.
        nesterov: Whether to use Nesterov's form; the paper has both. The other form oscillates more, and learnt badly
            here at rates that suit plain SGD.
        **settings: See `PeriodicAveraging`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 4,
        block_rate: float | None = None,
        momentum: float | None = None,
        nesterov: bool = True,
        **settings: Unpack[Settings],
    ) -> None:
        if not isinstance(nesterov, bool):
            raise TypeError(f"nesterov is {nesterov!r}, expected True or False")
        ζ = math.nan if block_rate is None else positive("block_rate", block_rate)
        η = math.nan if momentum is None else below_one("momentum", momentum)
        super().__init__(optimizer, Filter(ζ, η, nesterov), sync_every=sync_every, **settings)
