"""DiLoCo, distributed low-communication training (Douillard et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch
from communicators import Communicator, run, schedules
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
from local_sgd.rounds import MakeRounds, OuterRounds, checked_rounds


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
            32 bits or more; default torch's SGD with Nesterov momentum as above. It is then `.outer.optimizer`; its
            rates and settings are compared at every boundary, because anchors would differ between ranks otherwise.
        outer_scheduler: Makes a learning-rate scheduler for it, which steps after each outer step, so once a block.
        compress: Exchanges Δ in fewer bytes, and adds the residual to the next Δ: see `Compression`. The residual takes
            as much memory as z.
        allreduce: With `compress`, the sum over ranks of compressed Δ: see `Compression`. Without, makes the rounds
            that sum Δ, allreduce(like, comm): see `Rounds` and `OuterRounds`.
        **options: See `PeriodicAveraging`.
    """

    anchors = ("anchor",)
    more: tuple[str, ...] = ("outer",)

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every | Levels = 500,
        outer: MakeOptimizer = NESTEROV,
        outer_scheduler: MakeScheduler | None = None,
        compress: Compress = None,
        allreduce: Allreduce | MakeRounds | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.inner, every = two_levels(sync_every, options)
        make = checked_rounds(allreduce, compress, options, levels=self.inner is not None)
        self.compression = Compression(compress, cast(Allreduce | None, None if make else allreduce))
        super().__init__(optimizer, sync_every=every, **options)
        self.outer = Outer(self._parts, list(self.trained), outer, outer_scheduler)
        self._averaging.alike = self.outer.alike
        run(schedules.barrier(self.comm.rank, self.comm.size), self.comm, facts=f"DiLoCo{self.outer.alike()}")
        self._rounds: OuterRounds | None = None
        if make is not None:
            self.more = (*self.more, "rounds")
            self._rounds = OuterRounds(
                self._parts, self.outer, make, self.comm, weighted=self._weighted, what=self._what
            )

    def gain(self) -> float:
        """Gain of the outer optimizer's momentum."""
        return self.outer.gain()

    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """Gives Δ = z − x̄ to the outer optimizer."""
        self.outer.give(part, part["anchor"] - mean)
        return part["anchor"]

    def after_boundary(self) -> None:
        """Steps the outer optimizer."""
        self.outer.step()

    def more_state(self) -> dict[str, Any]:
        """Adds the state of the outer optimizer, and of rounds."""
        rounds = {} if self._rounds is None else {"rounds": self._rounds.state_dict()}
        return {**super().more_state(), **rounds, "outer": self.outer.state_dict()}

    def check_more(self, state: Mapping[str, Any]) -> None:
        """Checks the state of the outer optimizer too."""
        super().check_more(state)
        if ("rounds" in state) != (self._rounds is not None):
            raise ValueError(f"the state is of outer steps {'by' if 'rounds' in state else 'without'} rounds")
        self.outer.check(state["outer"])

    def load_more(self, state: dict[str, Any]) -> None:
        """Restores the outer optimizer, and the rounds."""
        super().load_more(state)
        self.outer.load_state_dict(state["outer"])
        if self._rounds is not None and not state["drained"]:  # else nothing is in them
            self._rounds.load_state_dict(state["rounds"])

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Tells other ranks' rounds of an exception; otherwise calls `finish`."""
        if self._rounds is not None and kind is not None:
            self._rounds.give_up(error[0])
        super().__exit__(kind, *error)

    def _depart(self) -> None:
        if self._rounds is None:
            super()._depart()
        elif self._drained:
            if any(not torch.equal(part["anchor"], part.gather()) for part in self._parts):
                raise RuntimeError(
                    "the model has other weights than those that its ranks ended with, which the rounds of allreduce= "
                    "do not compare: load weights on all ranks before the DiLoCo is made"
                )
            self._drained = False

    def _sync_all(self) -> None:
        if self._rounds is None:
            super()._sync_all()
            return
        self._next_boundary()
        self._rounds.give(self._own_weight())
        self._block.end()

    def _end(self, *, most: int | None) -> None:
        if self._rounds is None:
            super()._end(most=most)
            return
        self._next_boundary()
        if weight := self._own_weight():
            self._rounds.give(weight)
        self._rounds.finish() if most is None else self._rounds.synchronize()
        self._block.end()
        self._drained = True
        self.end_steps()

    def _models(self, comm: Communicator) -> list[Tensor]:
        if self._rounds is not None and not self._drained:
            raise RuntimeError("averaged_model(): ranks may have applied unlike numbers of rounds: drain() first")
        return super()._models(comm)
