"""Overlap-Local-SGD (Wang, Liang & Joshi, ICASSP 2020)."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, below_one


@dataclass
class Pull(Rule):
    """Rule of `OverlapLocalSGD`."""

    alpha: float
    beta: float
    anchors = ("anchor",)
    momenta = ("momentum",)
    overlaps = True

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Moves z by v, and pulls x towards it."""
        z, v = part["anchor"], part["momentum"]
        v.mul_(self.beta).add_(mean - z)
        z.add_(v)
        return self.depart(part, x)

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Pulls x towards z."""
        return x.mul(1 - self.alpha).add_(part["anchor"], alpha=self.alpha)


class OverlapLocalSGD(PeriodicAveraging):
    """Pulls ranks to an anchor that is one block old, while the next mean travels.

        wait for x̄ of the last launch
        v ← β·v + (x̄ − z);  z ← z + v
        x ← (1 − α)·x + α·z
        launch the mean of x                                           every τ steps

    The authors' code divides by the learning rate and multiplies by it again. At a constant rate that is the same; this
    form also bears a rate that decays. The effective step is (1 − α)/(1 − αβ) of SGD's, 0.69 by default. Ranks with
    different data stay apart: the model is z (see `averaged_model`), never one rank's x.

    Args:
        optimizer: See `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        alpha: 0 ≤ α < 1; 0 is independent SGD.
        beta: 0 ≤ β < 1.
        **settings: See `PeriodicAveraging`; `native` has no use here and is refused.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 2,
        alpha: float = 0.6,
        beta: float = 0.7,
        **settings: Unpack[Settings],
    ) -> None:
        rule = Pull(below_one("alpha", alpha), below_one("beta", beta))
        super().__init__(optimizer, rule, sync_every=sync_every, **settings)
