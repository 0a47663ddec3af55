"""CoCoD-SGD, computation and communication decoupled (Shen et al., IJCAI 2019)."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings


@dataclass
class Decoupled(Rule):
    """Rule of `CoCoDSGD`."""

    anchors = ("launched",)
    own = ("launched",)
    overlaps = True
    mean_is_model = True

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Adds a − y to x, and launches the result."""
        return self.depart(part, x.add_(mean - part["launched"]))

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Keeps x as y, to be launched."""
        return part["launched"].copy_(x)


class CoCoDSGD(PeriodicAveraging):
    """Local SGD whose mean travels while the next block computes.

        wait for a = mean of y                          y: x at the last boundary
        x ← x + (a − y)
        y ← x;  launch the mean of y                                   every τ steps

    The model is x̄; ranks hold it one block late, and differ by their steps since then.

    Args:
        optimizer: See `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        **settings: See `PeriodicAveraging`; `native` has no use here and is refused.
    """

    def __init__(self, optimizer: Optimizer, *, sync_every: Every = 4, **settings: Unpack[Settings]) -> None:
        super().__init__(optimizer, Decoupled(), sync_every=sync_every, **settings)
