"""Streaming DiLoCo, with overlapping communication (Douillard et al., 2025)."""

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.compression import Allreduce, Compress, compressed
from local_sgd.driver import Driver
from local_sgd.fragments import Fragments
from local_sgd.outer import NESTEROV, MakeOptimizer, MakeScheduler, OuterStep
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rounds import MakeRounds, OuterRounds
from local_sgd.settings import Every, Settings, below_one, whole


@dataclass
class Mixed(OuterStep):
    """Rule of `StreamingDiLoCo`, of which every fragment has a copy."""

    alpha: float

    def taken(self, x: Tensor, z: Tensor) -> Tensor:
        """Mixes x with z, once the fragment's outer optimizer has stepped."""
        return x.mul_(self.alpha).add_(z, alpha=1 - self.alpha)


class StreamingDiLoCo(PeriodicAveraging):
    """Runs DiLoCo fragment by fragment, so that less travels at a time, while training goes on.

        launch the mean of x of the next fragment                      one of F every τ/F steps
        Δ = z − x̄;  z ← outer(z, Δ);  x ← α·x + (1 − α)·z             `delay` steps later

    The k-th of F fragments of a block is launched after its step ⌊k·τ/F⌋, and applied `delay` steps later, or before
    its next launch where that comes earlier. With one fragment, no delay and α = 0 it is DiLoCo, bit for bit. The
    model is z.

    With `allreduce` and without `compress`, the mean of a fragment is a round of its own that does not wait for the
    last rank, see `DiLoCo` and `OuterRounds`: each launch gives to the fragment whose turn it is.

        StreamingDiLoCo(inner, fragments=4, allreduce=partial(PartialAllreduce, quorum="majority", compress="int4"))

    Args:
        optimizer: Inner optimizer, see `PeriodicAveraging`.
        sync_every: τ, see `PeriodicAveraging`.
        fragments: A number of fragments, of about equal bytes in the order of the parameters (at most one per
            parameter); or a list of modules or lists of parameter names, one entry per fragment, which leave no
            parameter out.
        delay: Steps between launch and application, 0 or more.
        alpha: 0 ≤ α < 1, the weight of the rank's own steps meanwhile.
        outer: See `DiLoCo`; every fragment has its own, which steps when the fragment is applied.
        outer_scheduler: See `DiLoCo`; one per fragment, too.
        compress: See `DiLoCo`.
        allreduce: See `DiLoCo`; a `Work` that it returns is waited for when the fragment is applied. What makes rounds
            is given a list of lists of tensors, one for each fragment.
        **settings: See `PeriodicAveraging`; buffers and inner state are exchanged each time that all fragments have
            been launched once; `native` is refused.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 100,
        fragments: Fragments = 4,
        delay: int = 1,
        alpha: float = 0.5,
        outer: MakeOptimizer = NESTEROV,
        outer_scheduler: MakeScheduler | None = None,
        compress: Compress = None,
        allreduce: Allreduce | MakeRounds | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        delay = whole("delay", delay, ", 0 or more", least=0)
        if allreduce is not None and compress is None:
            driver: Driver = OuterRounds(allreduce, settings, fragments=fragments, delay=delay)
        else:
            driver = Driver(compressed(compress, allreduce), fragments, delay)
        rule = Mixed(outer, outer_scheduler, below_one("alpha", alpha))
        super().__init__(optimizer, rule, sync_every=sync_every, driver=driver, **settings)
