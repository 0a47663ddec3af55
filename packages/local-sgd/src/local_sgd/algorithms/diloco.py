"""DiLoCo, distributed low-communication training (Douillard et al., 2023)."""

from typing import Unpack

from torch.optim import Optimizer

from local_sgd.compression import Allreduce, Compress, compressed
from local_sgd.levels import Levels, boundaries_of
from local_sgd.outer import NESTEROV, MakeOptimizer, MakeScheduler, OuterStep
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rounds import MakeRounds, OuterRounds
from local_sgd.settings import Every, Settings


class DiLoCo(PeriodicAveraging):
    """Takes the change of hundreds of steps for one gradient of an outer optimizer.

        Δ = z − x̄
        z ← outer(z, Δ)                by default v ← β·v + Δ;  z ← z − η·(Δ + β·v), η = 0.7, β = 0.9
        x ← z                                                          every τ steps

    The model is z.

        DiLoCo(inner, outer=partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True),
               outer_scheduler=lambda outer: torch.optim.lr_scheduler.CosineAnnealingLR(outer, T_max=100))

    With `allreduce` and without `compress`, Δ is summed in rounds that do not wait for the last rank. Ranks may then
    take different numbers of outer steps between two `drain()`s; `finish()` is final.

        DiLoCo(inner, allreduce=partial(PartialAllreduce, quorum="majority"))

    Args:
        optimizer: Inner optimizer, AdamW in the paper.
        sync_every: τ, or two levels, see `LocalSGD`.
        outer: Makes the outer optimizer over the parameters given to it, which are z: one for each of the model's, in
            32 bits or more; default torch's SGD with Nesterov momentum as above. It is then `optimizer.rule.outer`; its
            rates and settings are compared at every boundary, because anchors would differ between ranks otherwise.
        outer_scheduler: Makes a learning-rate scheduler for it, which steps after each outer step, so once a block.
        compress: Exchanges Δ in fewer bytes, and adds the residual to the next Δ: see `compressed`. The residual takes
            as much memory as z.
        allreduce: With `compress`, the sum over ranks of compressed Δ: see `compressed`. Without, makes the rounds
            that sum Δ, allreduce(like, comm): see `MakeRounds` and `OuterRounds`.
        **settings: See `PeriodicAveraging`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every | Levels = 500,
        outer: MakeOptimizer = NESTEROV,
        outer_scheduler: MakeScheduler | None = None,
        compress: Compress = None,
        allreduce: Allreduce | MakeRounds | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        by_rounds = allreduce is not None and compress is None
        driver, every = boundaries_of(sync_every, compressed(compress, None if by_rounds else allreduce), settings)
        by = OuterRounds(allreduce, settings, levels=driver.two_levels) if by_rounds else driver
        super().__init__(optimizer, OuterStep(outer, outer_scheduler), sync_every=every, driver=by, **settings)
