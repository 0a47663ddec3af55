"""DiLoCo, distributed low-communication training (Douillard et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor
from torch.optim import Optimizer

from local_sgd.block import Every
from local_sgd.compression import Allreduce, Compress, Compression
from local_sgd.driver import Boundaries, Driver
from local_sgd.levels import Levels, two_levels
from local_sgd.outer import NESTEROV, MakeOptimizer, MakeScheduler, Outer
from local_sgd.parts import Part
from local_sgd.periodic import PeriodicAveraging
from local_sgd.rounds import MakeRounds, OuterRounds
from local_sgd.rule import Rule
from local_sgd.settings import Settings


@dataclass
class OuterStep(Rule):
    """Rule of `DiLoCo`: a step of an outer optimizer, made when training begins."""

    make: MakeOptimizer = field(repr=False)
    schedule: MakeScheduler | None = field(repr=False)
    outer: Outer = field(init=False, repr=False)
    anchors = ("anchor",)

    def begin(self, parts: Sequence[Part], names: Sequence[str]) -> None:
        """Makes the outer optimizer over the anchors."""
        self.outer = Outer(parts, names, self.make, self.schedule)

    def apply(self, parts: Sequence[Part], xs: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
        """Gives Δ = z − x̄ to the outer optimizer, and takes z."""
        self.outer.step(parts, [part["anchor"] - mean for part, mean in zip(parts, means, strict=True)])
        return [part["anchor"] for part in parts]

    def gain(self) -> float:
        """Gain of the outer optimizer's momentum."""
        return self.outer.gain()

    def alike(self) -> str:
        """Outer optimizer's settings and rates."""
        return f", outer optimizer {self.outer}"

    def state_dict(self) -> dict[str, Any]:
        """State of the outer optimizer."""
        return {"outer": self.outer.state_dict()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks the state of the outer optimizer."""
        self.outer.check(state["outer"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the outer optimizer."""
        self.outer.load_state_dict(state["outer"])


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
            32 bits or more; default torch's SGD with Nesterov momentum as above. It is then
            `optimizer.rule.outer.optimizer`; its rates and settings are compared at every boundary, because anchors
            would differ between ranks otherwise.
        outer_scheduler: Makes a learning-rate scheduler for it, which steps after each outer step, so once a block.
        compress: Exchanges Δ in fewer bytes, and adds the residual to the next Δ: see `Compression`. The residual takes
            as much memory as z.
        allreduce: With `compress`, the sum over ranks of compressed Δ: see `Compression`. Without, makes the rounds
            that sum Δ, allreduce(like, comm): see `Rounds` and `OuterRounds`.
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
        inner, every = two_levels(sync_every, settings)
        driver: Driver
        if allreduce is not None and compress is None:
            driver = OuterRounds(allreduce, settings, levels=inner is not None)
        else:
            driver = Boundaries(Compression(compress, allreduce), inner)
        rule = OuterStep(outer, outer_scheduler)
        super().__init__(optimizer, rule, sync_every=every, driver=driver, **settings)
