"""SlowMo, slow momentum (Wang, Tantia, Ballas & Rabbat, ICLR 2020)."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, below_one, positive


@dataclass
class SlowMomentum(Rule):
    """Rule of `SlowMo`."""

    alpha: float
    beta: float
    anchors = ("anchor",)
    momenta = ("momentum",)
    needs_rate = True

    def gain(self) -> float:
        """α/(1 − β); 0 without momentum."""
        return self.alpha / (1 - self.beta) if self.beta else 0.0

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Updates v, and moves z by α·v."""
        z, v, γ, last = part["anchor"], part["momentum"], part.rate, part.last_rate
        v.mul_(self.beta * (γ / last if last else 0.0)).add_(z - mean)
        return z.sub_(v, alpha=self.alpha)


class SlowMo(PeriodicAveraging):
    """Applies slow momentum over blocks, in units of the learning rate γ, each group's "lr" in the block's last step.

        u ← β·u + (z − x̄)/γ
        z ← z − α·γ·u
        x ← z                                                          every τ steps

    The state is v = γu, so that nothing is divided by γ: v ← β·(γ/γ of the last boundary)·v + (z − x̄); z ← z − α·v.
    After a boundary at γ = 0 the momentum starts again from zero. The model is z.

    A steady change is multiplied by α/(1 − β), on top of the factor of the inner SGD's own momentum. So α is 1 − β by
    default, and the learning rate means the same as without SlowMo. The paper's α = 1 asks for a smaller one.

    Args:
        optimizer: See `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        alpha: The slow rate α > 0, default 1 − β.
        beta: 0 ≤ β < 1; the paper's lie between 0.4 and 0.8.
        **settings: See `PeriodicAveraging`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 4,
        alpha: float | None = None,
        beta: float = 0.4,
        **settings: Unpack[Settings],
    ) -> None:
        beta = below_one("beta", beta)
        rule = SlowMomentum(1 - beta if alpha is None else positive("alpha", alpha), beta)
        super().__init__(optimizer, rule, sync_every=sync_every, **settings)
