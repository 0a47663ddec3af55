"""Boundaries: ranks exchange means, and every rank applies the rule to them, in mid-training and at its end."""

from __future__ import annotations

import math
import reprlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from communicators import Communicator, run, schedules
from replicas import Buffers, Wrapping, average_tensors
from torch import Tensor

from local_sgd.averaging import Arrived, Averaging, refuse_nonfinite
from local_sgd.compression import CompressedAveraging, Compression
from local_sgd.inner_state import inner_state
from local_sgd.parts import by_name, digest, parts_of, refuse_other_shapes
from local_sgd.rule import Part, Rule
from local_sgd.settings import Every, Settings, whole
from local_sgd.two_momenta import warn_of_two_momenta

NEEDS = ("algorithm", "block", "kept", "rates", "parameters", "drained")
COUNTERS = ("steps", "done", "length", "boundaries", "weight")


class Block:
    """Position of a rank in its block of τ steps; the first block has τ steps like every other.

    every: τ; a new value counts from the next block on. steps: in all blocks; done: in this one, of `length` (1 before
    the first step where τ is a function); weight: the sum of the weights of its steps; boundaries: exchanges so far.
    """

    def __init__(self, every: Every) -> None:
        if not callable(every):
            whole("sync_every", every, " of steps, or a function from the number of steps so far to one")
        self.every, self.length = every, 1 if callable(every) else every
        self.steps = self.done = self.boundaries = 0
        self.weight = 0.0

    def count(self, weight: float) -> bool:
        """Counts one step; returns whether it was the block's last."""
        if self.done == 0:
            every = self.every
            self.length = (
                whole(f"sync_every({self.steps})", every(self.steps), " of steps") if callable(every) else every
            )
        self.steps, self.done, self.weight = self.steps + 1, self.done + 1, self.weight + weight
        return self.done >= self.length

    def end(self) -> None:
        """Ends the block; the next step begins another."""
        self.done, self.weight = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Counters, as plain numbers."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters."""
        for name in COUNTERS:
            setattr(self, name, state[name])


class Driver(ABC):
    """Parameters as parts with the rule's state, and the points at which ranks exchange them; of one optimizer.

    parts: parameters that are averaged, as flat vectors. block: position of this rank between two boundaries; nearest:
    between two exchanges, of which a boundary may have several. averagings: all exchanges, among all ranks. comms: what
    they go over. ranks: number for which the rule is prepared, alike on all of them. drained: all ranks hold the model.
    loaded: whether a state was loaded since the last boundary. agreed: facts that ranks compared at the beginning.
    """

    two_levels = False
    overlaps = False
    """Whether training goes on during an exchange, whatever the rule."""
    inelastic: ClassVar[str] = ""
    """Reason why its ranks cannot come and go."""
    needs: tuple[str, ...] = NEEDS
    """Keys of `state_dict` that must be there."""

    def __init__(self, compression: Compression | None = None) -> None:
        self.compression = compression or Compression()

    def facts(self) -> dict[str, Any]:
        """Settings that ranks must share, by name."""
        return {"compress": self.compression} if self.compression else {}

    def begin(self, owner: Wrapping, rule: Rule, block: Block, buffers: Buffers, settings: Settings) -> None:
        """Starts the rule's state from x, the model, which all ranks hold; nothing is launched yet."""
        self.owner: Wrapping = weakref.proxy(owner)  # which goes, with its vectors, as soon as nobody has it
        self.rule, self.comm, self.what, self.comms = rule, owner.comm, owner.what, [owner.comm]
        self.block, self.nearest, self.buffers = block, block, buffers
        self._weighted, self._native = settings.get("weighted", False), settings.get("native", False)
        device = None if settings.get("anchor_device") is None else torch.device(str(settings["anchor_device"]))
        groups, nbytes, self.pieces = owner.param_groups, settings.get("bucket_bytes"), self.cut(owner.trained)
        names = [{id(p): name for name, p in piece.items()} for piece in self.pieces]
        self.parts = [part for named in names for part in parts_of(groups, named, nbytes, device)]
        self.sums = self.compression.sum_of(self.parts, self.comm, self.what)
        self._shared: list[Callable[[], None]] = []
        if (policy := settings.get("inner_state", "keep")) != "keep":
            self._shared.append(inner_state(policy, owner.optimizer, self.comm, self.what))
        if settings.get("buffers", "keep") != "keep":
            self._shared.append(buffers.at_boundary)
        self._resets = policy == "reset"
        self._begun: int | None = None  # hash of the parameters that ranks began with, until the next boundary
        self.loaded, self.agreed = False, ""
        self.ranks = self.comm.first_size
        for part in self.parts:
            x = part.gather()
            part.kept = {name: x.clone() for name in rule.anchors}
            part.kept |= {name: torch.zeros_like(x) for name in rule.momenta}
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

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """This rank's own part of a state, by parameter, so that it outlives another cut into vectors.

        waits: for what is under way, which is part of it. False, for newcomers: it says only that it is under way.
        """
        rounded = [part for part in self.parts if part.remainder is not None]
        rates = {part.group: part.last_rate for part in reversed(self.parts)}
        residuals = {} if self.sums is None else {"kind": self.sums.kind, "parts": self.sums.state_dict()}
        return {
            "algorithm": self.what,
            "block": self.block.state_dict(),
            "kept": {name: by_name(self.parts, [part[name] for part in self.parts]) for name in self.rule.kept},
            "remainders": by_name(rounded, [part.remainder for part in rounded if part.remainder is not None]),
            "rates": [rates.get(group, 0.0) for group in range(len(self.owner.param_groups))],
            "parameters": digest(self.owner.trained),
            "drained": self.drained,
            **({"residuals": residuals} if residuals else {}),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that does not fit; changes nothing."""
        if state["algorithm"] != self.what:
            raise ValueError(
                f"the state is of {state['algorithm']}, but this is {self.what}: to go on with another algorithm start "
                "from a plain checkpoint of the model, made inside averaged_model(), or after drain()"
            )
        if lacking := [key for key in self.needs if key not in state]:
            raise ValueError(f"the state lacks {lacking}: it was cut, or is of other settings of {self.what}")
        for name in self.rule.kept:
            refuse_other_shapes(name, state["kept"].get(name, {}), self.parts)
        if len(state["rates"]) != (groups := len(self.owner.param_groups)):
            raise ValueError(f"the state has {len(state['rates'])} parameter groups, the optimizer {groups}")
        if ("near" in state) != self.two_levels:
            raise ValueError(f"the state is of {1 + ('near' in state)} levels, sync_every of {1 + self.two_levels}")
        theirs, kind = state.get("residuals", {}).get("kind"), None if self.sums is None else self.sums.kind
        if theirs != kind:
            raise ValueError(f"the state is of compression {theirs}, but compress={self.compression!r} is {kind}")
        if self.sums is not None and self._is_own(state):
            self.sums.check(state["residuals"]["parts"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check` accepted."""
        self.block.load_state_dict(state["block"])
        for part in self.parts:
            for name in self.rule.kept:
                part[name].copy_(part.flat_of(state["kept"][name]))
            if part.remainder is not None:
                part.remainder = part.flat_of(state["remainders"])
            part.last_rate = state["rates"][part.group]
        if self.sums is not None and self._is_own(state):
            self.sums.load_state_dict(state["residuals"]["parts"])
        self.drained, self.loaded = state["drained"], True

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        """Whether the state was saved by this rank, among the same number of ranks."""
        return bool((state.get("rank"), state.get("world_size")) == (self.comm.rank, self.comm.size))

    def agree(self, facts: str) -> None:
        """Compares facts that are known only after the rule has begun; "" is none. Newcomers compare them later."""
        comm, self.agreed = self.comm, facts
        if facts and not self.owner.enters:
            comm.atomic(lambda: run(schedules.barrier(comm.rank, comm.size), comm, facts=f"{self.what}{facts}"))

    def join(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of another rank of an elastic group; this rank's own block begins now."""
        self.load_state_dict(state)
        self.loaded, self.ranks = False, state["ranks"]
        self.rule.fit(self.ranks)
        for averaging in self.averagings:
            averaging.ranks = self.ranks

    def averaging_of(self, parts: list[Part], rule: Rule, names: list[str]) -> Averaging:
        """Exchange of these parts, compressed where compression is asked for; begins the rule that is applied to them.

        names: of the parameters in them, in the model's order.
        """
        averaging = Averaging(self.comm, self.what, native=self._native)
        if self.sums is not None:
            averaging = CompressedAveraging(self.comm, self.what, parts, rule.anchors[0], self.sums)
        rule.begin(parts, names)
        averaging.alike = rule.alike
        return averaging

    def all_hold(self, models: list[Tensor]) -> None:
        """Notes that all ranks hold these models."""
        self._anchor(models)
        self.owner.end_steps()
        self.drained = True

    def put_model(self, models: list[Tensor]) -> None:
        """Puts the model in place on all ranks, which have ended their blocks."""
        self.put(models)
        self.all_hold(models)
        self.buffers.at_end()
        self.block.end()

    def depart(self) -> None:
        """Leaves the drained state before a step: anchors take the parameters that ranks hold now, loaded or not."""
        if self.drained:
            self.drained, self._begun = False, digest(self.owner.trained)
            self._anchor(part.gather() for part in self.parts)

    def _anchor(self, models: Iterable[Tensor]) -> None:
        for part, model in zip(self.parts, models, strict=True):
            for name in self.rule.anchors:
                part[name].copy_(model)

    def put(self, xs: Iterable[Tensor]) -> None:
        """Puts vectors, one for each part, into the parameters."""
        for part, x in zip(self.parts, xs, strict=True):
            if getattr(x, "shape", None) != (part.bucket.numel,):
                given = reprlib.repr(getattr(x, "shape", x))
                raise TypeError(
                    f"a boundary of {self.what} returned {given}, expected x after it, of {part.bucket.numel} elements"
                )
            part.put(x)

    def next_boundary(self, averaging: Averaging) -> None:
        """Checks, by the facts of this exchange, that ranks come to a boundary alike, and counts it."""
        self.owner.check_exchange()
        since = f", after states of boundary {self.block.boundaries} were loaded on all ranks," if self.loaded else ""
        if self._begun is not None:
            since += f", begun with parameters of hash {self._begun % 2**64:016x} (load weights on all ranks alike),"
        averaging.agree(since)
        self.loaded, self._begun = False, None
        if self.block.boundaries == 0 and not self._resets:
            warn_of_two_momenta(self.what, self.rule.gain(), self.owner.param_groups, self.block.length)
        self.block.boundaries += 1

    def share(self) -> None:
        """Shares buffers and inner state, as their policies say."""
        for share in self._shared:
            share()

    def own_weight(self, block: Block) -> float:
        """Weight of this rank in the mean at the end of its block."""
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
    """Exchange of the whole model at every boundary; the mean may travel during the next block."""

    _at_mean = True  # whether the last boundary left every rank at the mean

    def connect(self) -> list[Averaging]:
        """Makes the one exchange."""
        self._averaging = self.averaging_of(self.parts, self.rule, list(self.owner.trained))
        self.agree(self.rule.alike())
        self.needs = (*NEEDS, *self.rule.state_dict(), *["arrived"] * self.rule.overlaps)
        return [self._averaging]

    def all_hold(self, models: list[Tensor]) -> None:
        """Notes that all ranks hold these models, and nothing is under way."""
        super().all_hold(models)
        if self.rule.overlaps:
            self._averaging.store(Arrived([], 0.0, self.comm.size))

    def count(self, weight: float) -> None:
        """Counts a step; runs a boundary where one is due."""
        if self.block.count(weight):
            self._sync_all()

    def end(self, *, most: int | None) -> None:
        """Runs boundaries until all ranks have finished, at most `most` of them; then puts the model in place."""
        most = most if most is None else most + self.rule.overlaps
        arrived, means = self._sync(self.own_weight(self.block), finished=True), list[Tensor]()
        while arrived.unfinished:
            means = arrived.means or means
            if most is not None and (most := most - 1) < 1:
                self.refuse_undrained(arrived.unfinished)
            self.block.end()
            if most is None:  # as ranks do that go on
                self.owner.let_in(at_once=True)
            arrived = self._sync(0.0, finished=True)
        self.put_model(self._final(arrived.means, means) if self.rule.mean_is_model else self.anchors())

    def models(self, comm: Communicator) -> list[Tensor]:
        """Mean over ranks, the anchor, or the anchor as the mean under way will leave it."""
        if self.rule.mean_is_model:
            averaging = Averaging(comm, self.what, native=self._native, call="averaged_model")
            return averaging.now([part.gather() for part in self.parts], 1.0, finished=False).means
        if not self.rule.overlaps or not (arrived := self._averaging.arrived()).means:
            return self.anchors()
        drafts = [part.draft() for part in self.parts]
        self._moved(drafts, [draft.gather() for draft in drafts], arrived)
        return [draft[self.rule.anchors[0]] for draft in drafts]

    def state_dict(self, *, waits: bool = True) -> dict[str, Any]:
        """State of the rule besides and, if it overlaps, the mean under way, which is waited for, and not applied."""
        arrived = {}
        if self.rule.overlaps:
            arrived = {"arrived": self._averaging.arrived(waits=waits).state_dict(self.parts)}
        return {**super().state_dict(), **arrived, **self.rule.state_dict()}  # waiting may change residuals

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks the rule's state and the mean under way besides; it is of all parameters."""
        super().check(state)
        self.rule.check(state)
        if "rounds" in state and "rounds" not in self.needs:
            raise ValueError("the state is of outer steps by rounds, and this optimizer is without")
        if self.rule.overlaps:
            refuse_other_shapes("arrived", state["arrived"]["means"], self.parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the rule besides, and stores the mean that was under way."""
        super().load_state_dict(state)
        self.rule.load_state_dict(state)
        if self.rule.overlaps:
            self._averaging.store(Arrived.of_state(state["arrived"], self.parts))

    def _sync_all(self) -> None:
        """Runs a boundary among all ranks in mid-training."""
        self._sync(self.own_weight(self.block), finished=False)
        self.block.end()
        if not self.rule.overlaps:
            self.owner.end_steps()
        self.owner.let_in()

    def _sync(self, weight: float, *, finished: bool) -> Arrived:
        """Runs one boundary, and returns its means."""
        self.next_boundary(self._averaging)
        xs, overlaps = [part.gather() for part in self.parts], self.rule.overlaps
        arrived = self._averaging.arrived() if overlaps else self._averaging.now(xs, weight, finished=finished)
        refuse_nonfinite(self.parts, arrived.means, self.comm, self.what)
        self._set_rates()
        if self.ranks != self._averaging.ranks:  # of the means, alike on all ranks, whoever has died since then
            self.ranks = self._averaging.ranks
            self.rule.fit(self.ranks)
        xs = self._moved(self.parts, xs, arrived)
        self.put(xs)
        if arrived.means:
            self._at_mean = all(x is mean for x, mean in zip(xs, arrived.means, strict=True))
        if overlaps and arrived.unfinished:
            self._averaging.launch(xs, weight, finished=finished)
        self.share()
        return arrived

    def _moved(self, parts: list[Part], xs: list[Tensor], arrived: Arrived) -> list[Tensor]:
        """Applies the rule, with the means or, where there are none, without."""
        if not arrived.means:
            return [self.rule.depart(part, x) for part, x in zip(parts, xs, strict=True)]
        for part in parts:
            part.weight = arrived.weight
        moved = self.rule.apply(parts, xs, arrived.means)
        for part in parts:
            part.last_rate = part.rate
        return moved

    def _set_rates(self) -> None:
        """Sets the parts' learning rates; where the rule counts in them, the mean over ranks, the same on all."""
        rates = torch.tensor([group.get("lr", math.nan) for group in self.owner.param_groups], dtype=torch.float64)
        if self.rule.needs_rate:
            average_tensors([rates], self.comm, facts=f"learning rates of {self.what}")
        for part in self.parts:
            part.rate = float(rates[part.group])

    def _final(self, last: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        """Model at the end: the last mean or, where the last exchange had none, the one before: no rank has moved.

        Weighted ranks may have moved by steps of weight 0, and some rules leave ranks beside the mean; then all are
        averaged once more.
        """
        moved = self._weighted or not (self._at_mean or self.rule.overlaps)
        return last or (self.models(self.comm) if moved else before or [part.gather() for part in self.parts])
