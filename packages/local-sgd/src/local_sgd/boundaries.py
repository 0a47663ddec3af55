"""What happens at a boundary: ranks exchange means, and every rank applies the algorithm to them."""

from __future__ import annotations

import math

import torch
from communicators import Communicator, run
from communicators.dense_schedules import allreduce
from communicators.replicas.buffers import Buffers
from communicators.replicas.default_group import refuse_alone
from communicators.replicas.parameters import refuse_changes
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
    """Boundaries in mid-training and at its end, of one level or two; and the model that all of them come to."""

    _block: Block  # where this rank is between two of them
    _weighted: bool
    _by_default: bool  # nobody said which ranks there are
    _names: dict[int, str]  # of all parameters, by id
    _buffers: Buffers
    _inner: InnerState
    _drained: bool  # all ranks hold the model
    _begun: int | None = None  # the parameters' hash then, until the next boundary
    _loaded: bool  # a state, since the last boundary

    def _begin(self) -> None:
        """All ranks hold x: it is the model, and what would have arrived of a launch just now."""
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
        if self.overlaps:
            self._averaging.store(Arrived([], 0.0, self._comm.size))
        self._drained = True

    def _depart(self) -> None:
        """Before a step: of all ranks that hold the model, which is what they hold now, loaded meanwhile or not."""
        if self._drained:
            self._drained, self._begun = False, digest(self._trained)
            for part in self._parts:
                for name in self.anchors:
                    part[name].copy_(part.gather())

    def _agree(self, since: str) -> None:
        for averaging in self.averagings():
            averaging.agree(since)

    def _sync_all(self) -> None:
        """A boundary in mid-training."""
        self._sync(self._own_weight(), finished=False)
        self._block.end()
        if self._near is not None:
            self._near.met = 0

    def _sync_near(self, near: Near, *, finished: bool) -> int:
        """The mean of this rank's small group; returns how many of it had not finished."""
        self._refuse_misfits()
        xs = [part.gather() for part in self._parts]
        arrived = near.averaging.now(xs, self._own_weight(near.block), finished=finished)
        refuse_nonfinite(self._parts, arrived.means, near.comm, f"{self._what} in its group")
        for part, mean in zip(self._parts, arrived.means or xs, strict=True):
            part.put(mean)
        near.block.end()
        near.met += 1
        return arrived.unfinished

    def _sync(self, weight: float, *, finished: bool) -> Arrived:
        """A boundary."""
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
        self._refuse_misfits()
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
        """The groups' learning rates; where the algorithm counts in them, the mean over ranks, the same on all."""
        own = [float(group.get("lr", math.nan)) for group in self.param_groups]
        if not self.needs_rate:
            return own
        schedule = allreduce(torch.tensor(own, dtype=torch.float64), self._comm.rank, self._comm.size)
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
        """Boundaries until all ranks have finished, `most` of them; then the model."""
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
        """Until all of this rank's small group have finished."""
        while unfinished := self._sync_near(near, finished=True):
            if all_at_once:
                self._refuse_undrained(unfinished)
            if near.is_due:
                self._sync_all()
        near.begin()

    def _final(self, last: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        """The last mean, where the last exchange was of one; else nobody has moved since the one before.

        Unless what they did weighed nothing.
        """
        return last or (
            self._models(self._comm) if self._weighted else before or [part.gather() for part in self._parts]
        )

    def _anchors(self) -> list[Tensor]:
        return [part.gather() if self._drained else part[self.anchors[0]] for part in self._parts]

    def _models(self, comm: Communicator) -> list[Tensor]:
        """What the algorithm calls its model, now; nothing of it is applied."""
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
        """This rank's in the mean at the end of its block."""
        block = block or self._block
        if block.done == 0:
            return 0.0
        return block.weight if self._weighted else 1.0

    def _refuse_misfits(self) -> None:
        """At a boundary: ranks or parameters that are no longer those of the beginning."""
        if self._by_default and self._comm.size == 1:
            refuse_alone(f"a {self._what}")
        refuse_changes(self.optimizer, self._names, list(self._trained.values()), what=self._what)

    def _refuse_undrained(self, unfinished: int) -> None:
        raise RuntimeError(
            f"drain() is for all ranks at the same point, but {unfinished} of {self._comm.size} went on with "
            "average(): a rank that has no more steps calls finish()"
        )
