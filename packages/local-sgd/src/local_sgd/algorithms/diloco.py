"""DiLoCo, distributed low-communication training (Douillard et al., 2023)."""

from __future__ import annotations

from typing import Any, Unpack

from communicators import run
from communicators.dense_schedules import barrier
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.block import Every
from local_sgd.compression.choice import Compression
from local_sgd.compression.sparsifier import Allreduce, Compress
from local_sgd.levels import Levels, two_levels
from local_sgd.options import Options
from local_sgd.outer import NESTEROV, MakeOptimizer, MakeScheduler, Outer
from local_sgd.parts import Part
from local_sgd.periodic import PeriodicAveraging


class DiLoCo(PeriodicAveraging):
    """What hundreds of steps changed is one gradient of an outer optimizer.

        Δ = z − x̄
        z ← outer(z, Δ)                by default v ← β·v + Δ;  z ← z − η·(Δ + β·v), η = 0.7, β = 0.9
        x ← z                                                          every τ steps

    The model is z.

        DiLoCo(inner, outer=partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True),
               outer_scheduler=lambda outer: torch.optim.lr_scheduler.CosineAnnealingLR(outer, T_max=100))

    outer: makes the outer optimizer over the parameters given to it, which are z: one for each of the model's, in 32
        bits or more; default torch's SGD with Nesterov momentum as above. It is `.outer.optimizer` then; its rates and
        settings are compared at every boundary, since anchors of ranks would part by others.
    outer_scheduler: makes a learning-rate scheduler of it, which takes a step after each of its steps, so one a block.
    compress, allreduce: exchange Δ in fewer bytes, with what was left out added to the next one: see `Compression`, and
        the README. What was left out takes as much memory as z.
    sync_every: τ, or two levels, see `LocalSGD`.
    optimizer: the inner one, AdamW in the paper.  options: see `PeriodicAveraging`.
    """

    anchors = ("anchor",)
    more = ("outer",)

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every | Levels = 500,
        outer: MakeOptimizer = NESTEROV,
        outer_scheduler: MakeScheduler | None = None,
        compress: Compress = None,
        allreduce: Allreduce | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.compression = Compression(compress, allreduce)
        self.inner, every = two_levels(sync_every, options)
        super().__init__(optimizer, sync_every=every, **options)
        self.outer = Outer(self._parts, list(self._trained), outer, outer_scheduler)
        self._exchange.alike = self.outer.alike
        run(barrier(self.comm.rank, self.comm.size), self.comm, facts=f"DiLoCo{self.outer.alike()}")

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """See `PeriodicAveraging.boundary`."""
        self.outer.give(part, part["anchor"] - mean)
        return part["anchor"]

    def after_boundary(self) -> None:
        """See `PeriodicAveraging.after_boundary`."""
        self.outer.step()

    def more_state(self) -> dict[str, Any]:
        """See `PeriodicAveraging.more_state`."""
        return {**super().more_state(), "outer": self.outer.state_dict()}

    def check_more(self, state: dict[str, Any]) -> None:
        """See `PeriodicAveraging.check_more`."""
        super().check_more(state)
        self.outer.check(state["outer"])

    def load_more(self, state: dict[str, Any]) -> None:
        """See `PeriodicAveraging.load_more`."""
        super().load_more(state)
        self.outer.load_state_dict(state["outer"])
