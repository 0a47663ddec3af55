"""Local SGD (Stich, ICLR 2019; Zhang et al., 2016)."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.compression import Allreduce, Compress, compressed
from local_sgd.levels import Levels, boundaries_of
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings


@dataclass
class Mean(Rule):
    """Rule of `LocalSGD`, with an anchor where changes are compressed."""

    mean_is_model = True

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Takes the mean for x and for any anchor."""
        for name in self.anchors:
            part[name].copy_(mean)
        return mean


class LocalSGD(PeriodicAveraging):
    """Averages the models of all ranks after every τ steps of their own.

        x ← x̄                                                          every τ steps

    With sync_every=1 and an inner SGD (momentum, Nesterov and weight decay included) it is synchronous SGD within
    rounding. The model is x̄.

        LocalSGD(inner, compress="int8")               z ← z + mean(x − z), rounded; x ← z

    Args:
        optimizer: See `PeriodicAveraging`.
        sync_every: τ, or two levels: `[(machine, 1), (everybody, 100)]` takes plain means within this rank's small
            group every step, and applies the algorithm among all ranks every 100 steps. See "Over slow links".
        compress: Exchanges the change since the last boundary in fewer bytes, and adds the residual to the next change:
            see `compressed`. It keeps z, and as much again for the residual.
        allreduce: Sums compressed changes over ranks: see `compressed`.
        **settings: See `PeriodicAveraging`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every | Levels = 4,
        compress: Compress = None,
        allreduce: Allreduce | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        sums, rule = compressed(compress, allreduce), Mean()
        driver, every = boundaries_of(sync_every, sums, settings)
        if sums is not None:
            rule.anchors = ("agreed",)
        super().__init__(optimizer, rule, sync_every=every, driver=driver, **settings)
