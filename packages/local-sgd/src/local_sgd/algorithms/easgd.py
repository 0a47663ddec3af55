"""Elastic averaging SGD (Zhang, Choromanska & LeCun, NeurIPS 2015)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from replicas import check_like
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, number


@dataclass
class Elastic(Rule):
    """Rule of `EASGD`; NaN stands for the default."""

    alpha: float
    anchors = ("anchor",)
    overlaps = True
    pulled: float = field(default=0.0, init=False, repr=False)  # α with which ranks were pulled last

    def prepare(self, size: int) -> None:
        """Sets α to 0.9/P by default; refuses values that do not contract."""
        if math.isnan(self.alpha):
            self.alpha = 0.9 / size
        if not 0 < self.alpha < 2 / (size + 1):
            raise ValueError(
                f"alpha is {self.alpha}, expected 0 < alpha < 2/(P + 1) = {2 / (size + 1):.4g} for P = {size} ranks: "
                "outside ranks and anchor swing apart; the default is 0.9/P"
            )

    def apply(self, parts: Sequence[Part], xs: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
        """Adds α·Σ(x − z) to z, with the α that pulled what the mean is of, and pulls x."""
        α = self.pulled
        for part, mean in zip(parts, means, strict=True):
            z = part["anchor"]
            z.add_(mean - z, alpha=α * part.weight / (1 - α))
        return [self.depart(*each) for each in zip(parts, xs, strict=True)]

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Pulls x towards z."""
        self.pulled = self.alpha
        return x.mul(1 - self.alpha).add_(part["anchor"], alpha=self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """α with which ranks were pulled last; the default changes with their number."""
        return {"pulled": self.pulled}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless it is a number."""
        check_like(state, {"pulled": 0.0}, "")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        self.pulled = state["pulled"]


class EASGD(PeriodicAveraging):
    """Pulls ranks and an anchor towards each other; ranks stay apart, and explore.

        z' = z + α·Σ(x − z)            over all P ranks
        x ← (1 − α)·x + α·z
        z ← z'                                                         every τ steps

    z is not needed before the next boundary, so its exchange overlaps, and changes nothing: ranks send the pulled x,
    from which Σ(x − z) = Σ(pulled x − z)/(1 − α). A boundary does not change Σx + z. It contracts only for 0 < α < 2/(P
    + 1); other values are refused. The model is z.

    Args:
        optimizer: See `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        alpha: α, default 0.9/P.
        **settings: See `PeriodicAveraging`. weighted=True is refused, because there is no mean to weight, and so is
            `native`, which has no use here.
    """

    def __init__(
        self, optimizer: Optimizer, *, sync_every: Every = 4, alpha: float | None = None, **settings: Unpack[Settings]
    ) -> None:
        if settings.get("weighted"):
            raise ValueError("EASGD sums over ranks and has no mean to weight: leave out weighted=True")
        rule = Elastic(math.nan if alpha is None else number("alpha", alpha))
        super().__init__(optimizer, rule, sync_every=sync_every, **settings)
