"""Boundaries: ranks exchange means, and every rank applies the algorithm to them."""

from __future__ import annotations

import math

import torch
from communicators import Communicator, run, schedules
from replicas import Buffers
from torch import Tensor

from local_sgd.algorithm import Algorithm
from local_sgd.averaging import Arrived
from local_sgd.block import Block
from local_sgd.inner_state import InnerState
from local_sgd.levels import Near
from local_sgd.nonfinite import refuse_nonfinite
from local_sgd.parts import Part
from local_sgd.saved import digest
from local_sgd.two_momenta import warn_of_two_momenta


class Boundaries(Algorithm):
    """Runs boundaries in mid-training and at its end, of one level or two, and computes the model that they lead to."""

    _block: Block  # position of this rank between two boundaries
    _weighted: bool
    _buffers: Buffers
    _inner: InnerState
    _drained: bool  # all ranks hold the model
    _begun: int | None = None  # hash of the parameters that ranks began with, until the next boundary
    _loaded: bool  # whether a state was loaded since the last boundary

    def _begin(self) -> None:
        """Starts the state from x, the model, which all ranks hold; nothing is launched yet."""
        xs = [part.gather() for part in self._parts]
        for part, x in zip(self._parts, xs, strict=True):
            part.kept = {name: x.clone() for name in self.anchors} | {
                name: torch.zeros_like(x) for name in self.momenta
            }
        self._all_hold(xs)

    def _all_hold(self, models: list[Tensor]) -> None:
        for part, model in zip(self._parts, models, strict=True):
            for name in self.anchors:
                part[name].copy_(model)
        self.end_steps()
        if self.overlaps:
            self._averaging.store(Arrived([], 0.0, self._comm.size))
        self._drained = True

    def _depart(self) -> None:
        """Leaves the drained state before a step: anchors take the parameters that ranks hold now, loaded or not."""
        if self._drained:
            self._drained, self._begun = False, digest(self.trained)
            for part in self._parts:
                for name in self.anchors:
                    part[name].copy_(part.gather())

    def _agree(self, since: str) -> None:
        for averaging in self.averagings():
            averaging.agree(since)

    def _sync_all(self) -> None:
        """Runs a boundary among all ranks in mid-training."""
        self._sync(self._own_weight(), finished=False)
        self._block.end()
        if not self.overlaps:
            self.end_steps()
        if self._near is not None:
            self._near.met = 0

    def _sync_near(self, near: Near, *, finished: bool) -> int:
        """Averages within this rank's small group; returns how many of its ranks had not finished."""
        self.check_exchange()
        xs = [part.gather() for part in self._parts]
        arrived = near.averaging.now(xs, self._own_weight(near.block), finished=finished)
        refuse_nonfinite(self._parts, arrived.means, near.comm, f"{self._what} in its group")
        for part, mean in zip(self._parts, arrived.means or xs, strict=True):
            part.put(mean)
        near.block.end()
        near.met += 1
        return arrived.unfinished

    def _sync(self, weight: float, *, finished: bool) -> Arrived:
        """Runs one boundary, and returns its means."""
        self._next_boundary()
        xs = [part.gather() for part in self._parts]
        arrived = self._averaging.arrived() if self.overlaps else self._averaging.now(xs, weight, finished=finished)
        refuse_nonfinite(self._parts, arrived.means, self._comm, self._what)
        xs = self._apply(xs, arrived)
        if self.overlaps and arrived.unfinished:
            self._averaging.launch(xs, weight, finished=finished)
        self._inner.at_boundary()
        self._buffers.at_boundary()
        return arrived

    def _next_boundary(self) -> None:
        self.check_exchange()
        if self._loaded:
            self._loaded = False
            self._agree(f", after states of boundary {self._block.boundaries} were loaded on all ranks,")
        if self._begun is not None:
            self._agree(
                f", begun with parameters of hash {self._begun % 2**64:016x} (load weights on all ranks alike),"
            )
            self._begun = None
        if self._block.boundaries == 0 and not self._inner.resets:
            warn_of_two_momenta(self._what, self.gain(), self.param_groups, self._block.length)
        self._block.boundaries += 1

    def _rates(self) -> list[float]:
        """Learning rates of the groups; where the algorithm counts in them, the mean over ranks, the same on all."""
        own = [float(group.get("lr", math.nan)) for group in self.param_groups]
        if not self.needs_rate:
            return own
        schedule = schedules.allreduce(torch.tensor(own, dtype=torch.float64), self._comm.rank, self._comm.size)
        total = run(schedule, self._comm, facts=f"learning rates of {self._what}", device=torch.device("cpu"))
        return [float(rate) for rate in total / self._comm.size]

    def _apply(self, xs: list[Tensor], arrived: Arrived) -> list[Tensor]:
        rates = self._rates()
        for part in self._parts:
            part.rate = rates[part.group]
        if not arrived.means:
            moved = [self.depart(part, x) for part, x in zip(self._parts, xs, strict=True)]
        else:
            moved = [self._moved(*each, arrived.weight) for each in zip(self._parts, xs, arrived.means, strict=True)]
            self.after_boundary()
        for part, x in zip(self._parts, moved, strict=True):
            part.put(x)
        return moved

    def _moved(self, part: Part, x: Tensor, mean: Tensor, weight: float) -> Tensor:
        part.weight = weight
        moved = self.boundary(part, x, mean)
        part.last_rate = part.rate
        return moved

    def _end(self, *, most: int | None) -> None:
        """Runs boundaries until all ranks have finished, at most `most` of them; then puts the model in place."""
        if self._near is not None:
            self._end_near(self._near, all_at_once=most is not None)
        arrived, means = self._sync(self._own_weight(), finished=True), list[Tensor]()
        while arrived.unfinished:
            means = arrived.means or means
            if most is not None and (most := most - 1) < 1:
                self._refuse_undrained(arrived.unfinished)
            arrived = self._sync(0.0, finished=True)
        models = self._final(arrived.means, means) if self.mean_is_model else self._anchors()
        for part, model in zip(self._parts, models, strict=True):
            part.put(model)
        self._all_hold(models)
        self._buffers.at_end()
        self._block.end()

    def _end_near(self, near: Near, *, all_at_once: bool) -> None:
        """Averages within this rank's small group until all its ranks have finished."""
        while unfinished := self._sync_near(near, finished=True):
            if all_at_once:
                self._refuse_undrained(unfinished)
            if near.is_due:
                self._sync_all()
        near.begin()

    def _final(self, last: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        """Model at the end: the last mean or, where the last exchange had none, the one before: no rank has moved.

        Weighted ranks may have moved by steps of weight 0; then all are averaged once more.
        """
        return last or (
            self._models(self._comm) if self._weighted else before or [part.gather() for part in self._parts]
        )

    def _anchors(self) -> list[Tensor]:
        return [part.gather() if self._drained else part[self.anchors[0]] for part in self._parts]

    def _models(self, comm: Communicator) -> list[Tensor]:
        """Current model, as the algorithm defines it; nothing of it is applied."""
        if self.mean_is_model:
            xs = [part.gather() for part in self._parts]
            return self._averaging.plain(xs, comm, "averaged_model()")
        if not self.overlaps or not (arrived := self._averaging.arrived()).means:
            return self._anchors()
        drafts = [part.draft() for part in self._parts]
        for draft, mean in zip(drafts, arrived.means, strict=True):
            self._moved(draft, draft.gather(), mean, arrived.weight)
        return [draft[self.anchors[0]] for draft in drafts]

    def _own_weight(self, block: Block | None = None) -> float:
        """Weight of this rank in the mean at the end of its block."""
        block = block or self._block
        if block.done == 0:
            return 0.0
        return block.weight if self._weighted else 1.0

    def _refuse_undrained(self, unfinished: int) -> None:
        raise RuntimeError(
            f"drain() is for all ranks at the same point, but {unfinished} of {self._comm.size} went on with "
            "average(): a rank that has no more steps calls finish()"
        )
