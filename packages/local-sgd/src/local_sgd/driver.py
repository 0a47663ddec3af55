"""Boundaries: ranks exchange means, and every rank applies the rule to them, in mid-training and at its end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from communicators import Communicator, run, schedules
from replicas import Buffers, Wrapping
from torch import Tensor

from local_sgd.averaging import Arrived, Averaging, refuse_nonfinite
from local_sgd.block import Block
from local_sgd.compression import CompressedAveraging, Compression
from local_sgd.inner_state import InnerState
from local_sgd.levels import Inner, Near
from local_sgd.parts import digest, parts_of, refuse_other_shapes
from local_sgd.rule import Part, Rule
from local_sgd.settings import Settings
from local_sgd.two_momenta import warn_of_two_momenta


class Driver(ABC):
    """Parameters as parts with the rule's state, and the points at which ranks exchange them; of one optimizer.

    parts: parameters that are averaged, as flat vectors. block: position of this rank between two boundaries.
    averagings: all exchanges. near: this rank's small group, of two levels. drained: all ranks hold the model.
    loaded: whether a state was loaded since the last boundary.
    """

    near: Near | None = None

    def __init__(self, compression: Compression | None = None, inner: Inner | None = None) -> None:
        self.compression, self.inner = compression or Compression(), inner

    def facts(self) -> dict[str, Any]:
        """Settings that ranks must share, by name."""
        shared: dict[str, Any] = {"compress": self.compression} if self.compression else {}
        return shared | ({"levels": self.inner} if self.inner else {})

    def begin(self, owner: Wrapping, rule: Rule, block: Block, buffers: Buffers, settings: Settings) -> None:
        """Starts the rule's state from x, the model, which all ranks hold; nothing is launched yet."""
        self.owner, self.rule, self.comm, self.what = owner, rule, owner.comm, owner.what
        self.block, self.buffers = block, buffers
        self._weighted, self._native = settings.get("weighted", False), settings.get("native", False)
        device = None if settings.get("anchor_device") is None else torch.device(str(settings["anchor_device"]))
        groups, nbytes, self.pieces = owner.param_groups, settings.get("bucket_bytes"), self.cut(owner.trained)
        self.parts = [part for piece in self.pieces for part in parts_of(groups, piece, nbytes, device)]
        if self.inner is not None:
            self.near = Near(self.inner, self.comm, self.what, native=self._native)
        self.sums = self.compression.sum_of(self.parts, self.comm, self.what)
        policy = settings.get("inner_state", "keep")
        self._resets, inner_state = policy == "reset", InnerState(policy, owner.optimizer, self.comm, self.what)
        self._shared = [inner_state.at_boundary] * (policy != "keep")
        self._shared += [buffers.at_boundary] * (settings.get("buffers", "keep") != "keep")
        self._begun: int | None = None  # hash of the parameters that ranks began with, until the next boundary
        self.loaded = False
        for part in self.parts:
            x = part.gather()
            part.kept = {name: x.clone() for name in self.rule.anchors}
            part.kept |= {name: torch.zeros_like(x) for name in self.rule.momenta}
        self.averagings = self.connect()
        self.all_hold([part.gather() for part in self.parts])

    def cut(self, trained: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Groups the parameters that are exchanged together; no part spans two groups."""
        return [trained]

    @abstractmethod
    def connect(self) -> list[Averaging]:
        """Makes the exchanges, among all ranks, and begins the rule."""

    @abstractmethod
    def count(self, weight: float) -> None:
        """Counts a step, and exchanges what is due."""

    @abstractmethod
    def end(self, *, most: int | None) -> None:
        """Ends this rank's steps with the model in place; most: boundaries to it at most, on all ranks at once."""

    @abstractmethod
    def models(self, comm: Communicator) -> list[Tensor]:
        """Current model, as the rule defines it; nothing of it is applied."""

    def give_up(self, error: BaseException) -> None:
        """Tells other ranks of an error, where they would not see it in their next exchange."""
        del error

    def needs(self) -> tuple[str, ...]:
        """Keys of `state_dict`."""
        return tuple(self.rule.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """State beside parts and block: the rule's, and what is under way, which is waited for, and not applied."""
        return self.rule.state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        self.rule.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted."""
        self.rule.load_state_dict(state)

    def agree(self, facts: str) -> None:
        """Compares facts that are known only after the rule has begun; "" is none."""
        if facts:
            run(schedules.barrier(self.comm.rank, self.comm.size), self.comm, facts=f"{self.what}{facts}")

    def averaging_of(self, parts: list[Part]) -> Averaging:
        """Exchange of these parts, compressed where compression is asked for."""
        if self.sums is None:
            return Averaging(self.comm, self.what, native=self._native)
        return CompressedAveraging(self.comm, self.what, parts, self.rule.anchors[0], self.sums)

    def all_hold(self, models: list[Tensor]) -> None:
        """Notes that all ranks hold these models."""
        for part, model in zip(self.parts, models, strict=True):
            for name in self.rule.anchors:
                part[name].copy_(model)
        self.owner.end_steps()
        self.drained = True

    def depart(self) -> None:
        """Leaves the drained state before a step: anchors take the parameters that ranks hold now, loaded or not."""
        if self.drained:
            self.drained, self._begun = False, digest(self.owner.trained)
            for part in self.parts:
                for name in self.rule.anchors:
                    part[name].copy_(part.gather())

    def next_boundary(self) -> None:
        """Checks that ranks come to a boundary alike, and counts it."""
        self.owner.check_exchange()
        since = f", after states of boundary {self.block.boundaries} were loaded on all ranks," if self.loaded else ""
        if self._begun is not None:
            since += f", begun with parameters of hash {self._begun % 2**64:016x} (load weights on all ranks alike),"
        for averaging in self.averagings if since else ():
            averaging.agree(since)
        self.loaded, self._begun = False, None
        if self.block.boundaries == 0 and not self._resets:
            warn_of_two_momenta(self.what, self.rule.gain(), self.owner.param_groups, self.block.length)
        self.block.boundaries += 1

    def share(self) -> None:
        """Shares buffers and inner state, as their policies say."""
        for share in self._shared:
            share()

    def own_weight(self, block: Block | None = None) -> float:
        """Weight of this rank in the mean at the end of its block."""
        block = block or self.block
        if block.done == 0:
            return 0.0
        return block.weight if self._weighted else 1.0

    def refuse_undrained(self, unfinished: int) -> None:
        """Raises RuntimeError where ranks go on while this one drains."""
        raise RuntimeError(
            f"drain() is for all ranks at the same point, but {unfinished} of {self.comm.size} went on with "
            "average(): a rank that has no more steps calls finish()"
        )

    def anchors(self) -> list[Tensor]:
        """First anchor of each part, or x where all ranks hold the model."""
        return [part.gather() if self.drained else part[self.rule.anchors[0]] for part in self.parts]


class Boundaries(Driver):
    """Exchange of the whole model at every boundary, of one level or two; the mean may travel during the next block."""

    def connect(self) -> list[Averaging]:
        """Makes the one exchange."""
        self._averaging = self.averaging_of(self.parts)
        self.rule.begin(self.parts, list(self.owner.trained))
        self._averaging.alike = self.rule.alike
        self.agree(self.rule.alike())
        return [self._averaging]

    def all_hold(self, models: list[Tensor]) -> None:
        """Notes that all ranks hold these models, and nothing is under way."""
        super().all_hold(models)
        if self.rule.overlaps:
            self._averaging.store(Arrived([], 0.0, self.comm.size))

    def count(self, weight: float) -> None:
        """Counts a step; runs a boundary within the small group, or among all ranks, where one is due."""
        last = self.block.count(weight)
        if self.near is not None:
            if self.near.block.count(weight):
                self._sync_near(self.near, finished=False)
            last = self.near.is_due
        if last:
            self._sync_all()

    def end(self, *, most: int | None) -> None:
        """Runs boundaries until all ranks have finished, at most `most` of them; then puts the model in place."""
        if self.near is not None:
            self._end_near(self.near, all_at_once=most is not None)
        most = most if most is None else most + self.rule.overlaps
        arrived, means = self._sync(self.own_weight(), finished=True), list[Tensor]()
        while arrived.unfinished:
            means = arrived.means or means
            if most is not None and (most := most - 1) < 1:
                self.refuse_undrained(arrived.unfinished)
            arrived = self._sync(0.0, finished=True)
        models = self._final(arrived.means, means) if self.rule.mean_is_model else self.anchors()
        for part, model in zip(self.parts, models, strict=True):
            part.put(model)
        self.all_hold(models)
        self.buffers.at_end()
        self.block.end()

    def models(self, comm: Communicator) -> list[Tensor]:
        """Mean over ranks, the anchor, or the anchor as the mean under way will leave it."""
        if self.rule.mean_is_model:
            return self._averaging.plain([part.gather() for part in self.parts], comm, "averaged_model()")
        if not self.rule.overlaps or not (arrived := self._averaging.arrived()).means:
            return self.anchors()
        drafts = [part.draft() for part in self.parts]
        self._moved(drafts, [draft.gather() for draft in drafts], arrived)
        return [draft[self.rule.anchors[0]] for draft in drafts]

    def needs(self) -> tuple[str, ...]:
        """Keys of `state_dict`."""
        return (*super().needs(), *["arrived"] * self.rule.overlaps)

    def state_dict(self) -> dict[str, Any]:
        """State of the rule and, if it overlaps, the mean under way."""
        arrived = {"arrived": self._averaging.arrived().state_dict(self.parts)} if self.rule.overlaps else {}
        return {**arrived, **super().state_dict()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks the mean under way besides; it is of all parameters."""
        super().check(state)
        if "rounds" in state:
            raise ValueError("the state is of outer steps by rounds, and this optimizer is without")
        if self.rule.overlaps:
            refuse_other_shapes("arrived", state["arrived"]["means"], self.parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores the mean that was under way besides."""
        super().load_state_dict(state)
        if self.rule.overlaps:
            self._averaging.store(Arrived.of_state(state["arrived"], self.parts))

    def _sync_all(self) -> None:
        """Runs a boundary among all ranks in mid-training."""
        self._sync(self.own_weight(), finished=False)
        self.block.end()
        if not self.rule.overlaps:
            self.owner.end_steps()
        if self.near is not None:
            self.near.met = 0

    def _sync(self, weight: float, *, finished: bool) -> Arrived:
        """Runs one boundary, and returns its means."""
        self.next_boundary()
        xs, overlaps = [part.gather() for part in self.parts], self.rule.overlaps
        arrived = self._averaging.arrived() if overlaps else self._averaging.now(xs, weight, finished=finished)
        refuse_nonfinite(self.parts, arrived.means, self.comm, self.what)
        rates = self._rates()
        for part in self.parts:
            part.rate = rates[part.group]
        if arrived.means:
            xs = self._moved(self.parts, xs, arrived)
        else:
            xs = [self.rule.depart(part, x) for part, x in zip(self.parts, xs, strict=True)]
        for part, x in zip(self.parts, xs, strict=True):
            part.put(x)
        if overlaps and arrived.unfinished:
            self._averaging.launch(xs, weight, finished=finished)
        self.share()
        return arrived

    def _moved(self, parts: list[Part], xs: list[Tensor], arrived: Arrived) -> list[Tensor]:
        for part in parts:
            part.weight = arrived.weight
        moved = self.rule.apply(parts, xs, arrived.means)
        for part in parts:
            part.last_rate = part.rate
        return moved

    def _rates(self) -> list[float]:
        """Learning rates of the groups; where the rule counts in them, the mean over ranks, the same on all."""
        own = [float(group.get("lr", math.nan)) for group in self.owner.param_groups]
        if not self.rule.needs_rate:
            return own
        schedule = schedules.allreduce(torch.tensor(own, dtype=torch.float64), self.comm.rank, self.comm.size)
        total = run(schedule, self.comm, facts=f"learning rates of {self.what}", device=torch.device("cpu"))
        return [float(rate) for rate in total / self.comm.size]

    def _sync_near(self, near: Near, *, finished: bool) -> int:
        """Averages within this rank's small group; returns how many of its ranks had not finished."""
        self.owner.check_exchange()
        xs = [part.gather() for part in self.parts]
        arrived = near.averaging.now(xs, self.own_weight(near.block), finished=finished)
        refuse_nonfinite(self.parts, arrived.means, near.comm, f"{self.what} in its group")
        for part, mean in zip(self.parts, arrived.means or xs, strict=True):
            part.put(mean)
        near.block.end()
        near.met += 1
        return arrived.unfinished

    def _end_near(self, near: Near, *, all_at_once: bool) -> None:
        """Averages within this rank's small group until all its ranks have finished."""
        while unfinished := self._sync_near(near, finished=True):
            if all_at_once:
                self.refuse_undrained(unfinished)
            if near.is_due:
                self._sync_all()
        near.begin()

    def _final(self, last: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        """Model at the end: the last mean or, where the last exchange had none, the one before: no rank has moved.

        Weighted ranks may have moved by steps of weight 0; then all are averaged once more.
        """
        return last or (self.models(self.comm) if self._weighted else before or [part.gather() for part in self.parts])
