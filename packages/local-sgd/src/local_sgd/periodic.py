"""`PeriodicAveraging`: what all algorithms of the family share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from communicators import Communicator, Stats, as_communicator, run
from communicators.dense_schedules import allreduce
from communicators.replicas.buffers import Buffers
from communicators.replicas.default_group import refuse_alone
from communicators.replicas.parameters import refuse_changes
from communicators.replicas.wrapped_state import refuse_torch_helpers
from communicators.replicas.wrapping import Wrapping
from torch import Tensor, nn
from torch.optim import Optimizer

from local_sgd import beginning, saved
from local_sgd.averaging import Arrived, Averaging
from local_sgd.block import Block, Every
from local_sgd.compression.averaging import CompressedAveraging
from local_sgd.compression.choice import Compression
from local_sgd.inner_state import InnerState
from local_sgd.levels import Inner, Near
from local_sgd.nonfinite import refuse_nonfinite
from local_sgd.parts import Part, parts_of
from local_sgd.settings import number, policy, whole


class PeriodicAveraging(Wrapping):
    """Wraps an optimizer: its steps are local, and after every τ of them ranks exchange a mean of their models.

        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4)
        for ...:
            loss.backward()
            optimizer.step(); optimizer.zero_grad(); optimizer.average()
        optimizer.finish()

    x is a rank's model, x̄ the mean over ranks, and "boundary" after every τ-th `average`.

    Parameters of 16 bits are averaged in 32, and what is rounded off then stays with the rank that rounds.
    Frozen parameters (requires_grad False, now) are left out; freezing or adding some later is an error.

    Args:
        optimizer: Any, built over the live parameters; this object shares its param_groups, state and defaults.
        sync_every: τ, or a function that gives it from the number of steps before the block, such as a warm-up:
            `lambda step: 1 if step < 1000 else 16`. Ranks may have different ones: their blocks are exchanged in order.
        comm: See `communicators.as_communicator`; its `timeout` is how long a boundary waits for a late rank.
        model: Names parameters in errors, and has buffers, see `buffers`.
        buffers: Of the model, such as BatchNorm's: "keep", every rank its own; "average" at boundaries, what is not
            floating-point being rank 0's; "broadcast" rank 0's. Both wait for a small exchange at every boundary.
        inner_state: The wrapped optimizer's: "keep", every rank its own; "average" at boundaries; "reset" there.
        weighted: `average(weight)` is given a weight, such as the number of samples or tokens of the step; means are by
            the sums of them over blocks.
        broadcast: Rank 0's parameters, and buffers of `model`, are copied to all ranks now; False: ranks compare a hash
            of their parameters, and it is an error where they differ.
        native: By the transport's own allreduce: worlds then agree within rounding, not in all bits.
        bucket_bytes: Exchanged in vectors of at most so many bytes; default: one for each group, dtype and device.
        anchor_device: Where anchors, momenta and means live, such as "cpu"; default: with the parameters.

    Raises:
        CollectiveError: Alike on every rank: ranks differ in algorithm, settings or parameters, or later a mean is not
            finite.
    """

    anchors: tuple[str, ...] = ()
    """What an algorithm keeps that begins as x, and is the model when all is drained; the first one is its model."""
    momenta: ClassVar[tuple[str, ...]] = ()
    """What it keeps that begins at zero."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Its attributes that ranks must share."""
    overlaps: ClassVar[bool] = False
    """The mean at a boundary is of what was launched at the last one."""
    mean_is_model: ClassVar[bool] = False
    """The model is the mean over ranks, not the first anchor."""
    compression: Compression = Compression()
    """How the change is exchanged; without one, the model itself."""
    inner: Inner | None = None
    """The first of two levels."""
    more: tuple[str, ...] = ()
    """The keys of `more_state`."""
    needs_rate: ClassVar[bool] = False
    """Parameter groups must have an "lr"."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_every: Every = 4,
        comm: Any = None,
        model: nn.Module | None = None,
        buffers: str = "keep",
        inner_state: str = "keep",
        weighted: bool = False,
        broadcast: bool = True,
        native: bool = False,
        bucket_bytes: int | None = None,
        anchor_device: torch.device | str | None = None,
    ) -> None:
        policy("buffers", buffers, "keep", "average", "broadcast")
        policy("inner_state", inner_state, "keep", "average", "reset")
        if bucket_bytes is not None:
            whole("bucket_bytes", bucket_bytes, ", or None")
        self._block = Block(sync_every)
        super().__init__(optimizer)
        self._what = what = type(self).__name__
        if native and self.overlaps:
            raise ValueError(f"native=True waits for the transport, but {what} goes on meanwhile: leave it out")
        if native and self.compression:
            raise ValueError(
                f"native=True is the transport's sum, and compress={self.compression!r} another: leave one out"
            )
        if buffers != "keep" and model is None:
            raise ValueError(f"buffers={buffers!r} takes the model whose buffers they are: give model=")
        named = beginning.named_parameters(optimizer, model, needs_rate=self.needs_rate, what=what)
        self._by_default, self._comm = comm is None, as_communicator(comm)
        self.check()
        self._weighted, self._model = bool(weighted), model
        self._names = {id(p): name for name, p in named.items()}
        self._trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
        shared = {name: getattr(self, name) for name in self.settings}
        shared |= {"buffers": buffers, "inner_state": inner_state, "weighted": self._weighted, "native": native}
        shared |= {"compress": self.compression} if self.compression else {}
        shared |= {"levels": self.inner} if self.inner else {}
        beginning.agree(named, model, self._comm, what, {**shared, "bucket_bytes": bucket_bytes}, broadcast=broadcast)
        device = None if anchor_device is None else torch.device(anchor_device)
        groups, pieces = optimizer.param_groups, self.pieces()
        self._parts = [part for piece in pieces for part in parts_of(groups, piece, bucket_bytes, device)]
        self._native = native
        self._near = None if self.inner is None else Near(self.inner, self._comm, what, native=native)
        self._sums = self.compression.sum_of(self._parts, self._comm, what) if self.compression else None
        self._averaging = self.averaging_of(self._parts)
        self._buffers = Buffers(model, buffers, self._comm, what)
        self._inner = InnerState(inner_state, optimizer, self._comm, what)
        self._begin()
        self._said, self._sent_before, self._steps_before = shared, self._sent, 0
        self._showing, self._expected, self._loaded, self._unseen = False, None, False, 0

    @abstractmethod
    def boundary(self, part: Part, x: Tensor, mean: Tensor) -> Tensor:
        """The algorithm: x after the boundary; changes what is kept in `part`, and may change x.

        Args:
            part: Some of the parameters, flat, with what is kept of them.
            x: This rank's, a copy.
            mean: Over ranks, of x or, where the algorithm overlaps, of what the last boundary returned.

        Returns:
            What may be kept in `part` too; it is copied.
        """

    def after_boundary(self) -> None:
        """Called when `boundary` was, for all parts, and before what it returned is copied."""

    def more_state(self) -> dict[str, Any]:
        """What else the algorithm keeps, for `state_dict`."""
        near = {} if self._near is None else {"near": self._near.state_dict()}
        return near | (
            {} if self._sums is None else {"residuals": {"kind": self._sums.kind, "parts": self._sums.state_dict()}}
        )

    def check_more(self, state: dict[str, Any]) -> None:
        """Changes nothing.

        Args:
            state: What another one's `more_state` gave.

        Raises:
            ValueError: It does not fit here.
        """
        if ("near" in state) != (self._near is not None):
            raise ValueError(f"the state is of {1 + ('near' in state)} levels, sync_every of {1 + bool(self._near)}")
        theirs, own = state.get("residuals", {}).get("kind"), None if self._sums is None else self._sums.kind
        if theirs != own:
            raise ValueError(f"the state is of compression {theirs}, but compress={self.compression!r} is {own}")
        if self._sums is not None and self._is_own(state):
            self._sums.check(state["residuals"]["parts"])

    def load_more(self, state: dict[str, Any]) -> None:
        """Takes over what `more_state` gave and `check_more` let pass."""
        if self._sums is not None and self._is_own(state):
            self._sums.load_state_dict(state["residuals"]["parts"])
        if self._near is not None:
            self._near.load_state_dict(state["near"])

    def averagings(self) -> list[Averaging]:
        """All of them."""
        return [self._averaging]

    def pieces(self) -> list[dict[str, Tensor]]:
        """The parameters that are exchanged together; no vector holds some of two pieces."""
        return [self._trained]

    def averaging_of(self, parts: list[Part]) -> Averaging:
        """By which these parts are exchanged."""
        if self._sums is None:
            return Averaging(self._comm, self._what, native=self._native)
        return CompressedAveraging(self._comm, self._what, parts, self.anchors[0], self._sums)

    def depart(self, part: Part, x: Tensor) -> Tensor:
        """Of an algorithm that overlaps, its boundary where no mean comes: at the beginning and after a drain."""
        del part
        return x

    def check(self) -> None:
        """Fills in settings that depend on the number of ranks, `comm.size`.

        Raises:
            ValueError: A setting does not fit it.
        """

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._comm

    @property
    def sync_every(self) -> Every:
        """τ; another one counts from the next block on."""
        return self._block.every

    @sync_every.setter
    def sync_every(self, every: Every) -> None:
        if self.inner is not None:
            raise ValueError("sync_every of two levels stays as it is: drain(), and make another optimizer")
        self._block.every = every

    @property
    def hidden_fraction(self) -> float | None:
        """Of the seconds that exchanges took so far, the part in which this rank did not wait; None before the first.

        1 where every exchange is over before its mean is applied: at the next boundary, or in `StreamingDiLoCo` `delay`
        steps later. 0 where it is waited for at once: by algorithms that do not overlap, and with a delay of 0.
        """
        waited, under_way = map(sum, zip(*(averaging.seconds for averaging in self.averagings()), strict=True))
        return max(0.0, 1.0 - waited / under_way) if under_way > 0 else None

    def stats(self) -> Stats:
        """What training has cost and saved since this optimizer was made, on this rank; nothing is exchanged for it.

        Returns:
            Plain numbers for any logger; `str` says them in a line. See `communicators.Stats`, and:

            - boundaries: At which ranks have met.
            - bytes_sent: Over `comm`, also by others that use it, and over its small group if there are two levels.
        """
        waited, under_way = map(sum, zip(*(averaging.seconds for averaging in self.averagings()), strict=True))
        taken, size = self._block.steps - self._steps_before, self._comm.size
        nbytes = sum(p.numel() * p.element_size() for p in self._trained.values())
        counted = {"steps": self._block.steps, "boundaries": self._block.boundaries}
        sent = {"bytes_sent": self._sent - self._sent_before, "bytes_dense": taken * (2 * nbytes * (size - 1) // size)}
        hidden = max(0.0, under_way - waited)
        seconds = {"seconds_exchanging": under_way, "seconds_waited": waited, "seconds_hidden": hidden}
        return Stats({**counted, **sent, **seconds})

    def __repr__(self) -> str:
        """Settings, of the wrapped optimizer too."""
        settings = {"sync_every": self._block.every, **{name: value for name, value in self._said.items() if value}}
        said = [f"{name}={value!r}" for name, value in settings.items()]
        return f"{self._what}({', '.join(said)}, rank {self._comm.rank} of {self._comm.size}, {self.optimizer!r})"

    @property
    def _sent(self) -> int:
        near = 0 if self._near is None else self._near.comm.bytes_sent
        return self._comm.bytes_sent + near

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The wrapped optimizer's step, on this rank alone."""
        refuse_torch_helpers(self._what)
        self._refuse_shown("step()")
        self._refuse_other_parameters()
        self._drained, self._unseen = False, self._unseen + 1
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def average(self, weight: float | None = None) -> None:
        """Counts a step; at a boundary exchanges. Call it after every step, also after one that a GradScaler left out.

        Args:
            weight: Of this step, such as its number of samples; given if, and only if, the optimizer is `weighted`.
        """
        self._refuse_shown("average()")
        self._drained, self._unseen = False, 0
        weight = self._checked(weight)
        last = self._block.count(weight)
        if self._near is not None:
            if self._near.block.count(weight):
                self._sync_near(self._near, finished=False)
            last = self._near.is_due
        if last:
            self._sync_all()

    def drain(self) -> None:
        """Ends the block now, and what is under way; then every rank holds the model, in the same bits.

        For all ranks, at the same point. A rank that has fewer blocks than others calls `finish`.
        """
        self._end(most=2 if self.overlaps else 1)

    def finish(self) -> None:
        """This rank has no more steps: takes part in the others' boundaries until all have finished; then as `drain`.

        Ranks may come with different numbers of steps. After its last block a rank that has finished is left
        out of the means, and goes where the others go. Training may go on afterwards.
        """
        self._end(most=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`finish`, unless an exception leaves."""
        if kind is None:
            self.finish()

    def wait(self) -> None:
        """Waits for what is under way, which is applied at the next boundary as ever; so that it can be counted."""
        for averaging in self.averagings():
            averaging.wait()

    @contextmanager
    def averaged_model(self, *, comm: Any = None) -> Iterator[nn.Module | None]:
        """Inside, the parameters are those of what the algorithm calls its model; afterwards this rank's own again.

            with optimizer.averaged_model():
                evaluate(model); torch.save(model.state_dict(), path)

        For every rank to call, between the same boundaries; training goes on with the same bits. Buffers of `model`
        are averaged inside, or rank 0's with buffers="broadcast".

        Args:
            comm: The same ranks by another communicator, such as one that counts bytes apart from training's.

        Yields:
            `model`.
        """
        self._refuse_shown("averaged_model()")
        comm = self._comm if comm is None else as_communicator(comm)
        models = self._models(comm)
        own = [p.detach().clone() for p in self._trained.values()]
        with self._buffers.shared(comm):
            self._showing = True
            try:
                for part, model in zip(self._parts, models, strict=True):
                    part.show(model)
                yield self._model
            finally:
                self._showing = False
                with torch.no_grad():
                    for p, value in zip(self._trained.values(), own, strict=True):
                        p.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", all else: each rank saves its own, and its own model.

        What is under way is waited for and stored, not applied. References; loadable by torch.load(weights_only=True).
        """
        refuse_torch_helpers(self._what)
        self._refuse_shown("state_dict()")
        self._refuse_other_parameters()
        arrived = self._averaging.arrived() if self.overlaps else None
        return saved.state_dict(self, self._parts, self._block, arrived, drained=self._drained)

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that rank 0 alone writes; for every rank to call.

        On rank 0, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by `load_state_dict`, which
        takes its own part. Each rank's model is its own too, and is not in it. Loadable by
        torch.load(weights_only=True).

        Raises:
            CollectiveError: `state_dict` raises on another rank, which is named.
        """
        return saved.gathered_state(self.state_dict, self._comm)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where this rank's `state_dict` or `gathered_state_dict` was taken: the same bits, also in mid-block.

        The model's parameters are loaded from this rank's own model, after the optimizer was made, before its first
        step; that they are those is checked there. A state that was taken after `drain` or `finish` is alike on all
        ranks, but for the wrapped optimizer's: any rank's may be loaded on every rank, of any number of ranks.
        Settings such as `sync_every` and `buffers` are this optimizer's own: a state goes on under others, too.
        That all ranks have loaded, and states of the same boundary, is seen at the next one: else a CollectiveError.

        Args:
            state_dict: What `state_dict` gave on this rank, or `gathered_state_dict` on rank 0.

        Raises:
            ValueError: It is of another algorithm, of other parameters and, unless it was drained, of another rank or
                number of ranks; or, where a compressor keeps residuals, of another cut (`bucket_bytes`, fragments).
        """
        refuse_torch_helpers(self._what)
        self._refuse_shown("load_state_dict()")
        state_dict = saved.own_state(state_dict, self._comm)
        own = saved.checked(self, state_dict, self._parts)
        self.wait()  # an error of what is under way is raised before anything is changed
        taken = self._block.steps - self._steps_before
        arrived = saved.load(self, state_dict, own, self._parts, self._block)
        self._steps_before = self._block.steps - taken
        if arrived is not None:
            self._averaging.store(arrived)
        self._drained, self._expected, self._loaded = own["drained"], own["parameters"], True

    def _is_own(self, state: dict[str, Any]) -> bool:
        """Whether it was saved by this rank of as many."""
        return bool((state["rank"], state["world_size"]) == (self._comm.rank, self._comm.size))

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

    def _end_near(self, near: Near, *, all_at_once: bool) -> None:
        """Until all of this rank's small group have finished."""
        while unfinished := self._sync_near(near, finished=True):
            if all_at_once:
                self._refuse_undrained(unfinished)
            if near.is_due:
                self._sync_all()
        near.begin()

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
            for averaging in self.averagings():
                averaging.loaded(self._block.boundaries)
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
        self._refuse_unended()
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
        self._block.end()

    def _final(self, last: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        """The last mean, where the last exchange was of one; else nobody has moved since the one before.

        Unless what they did weighed nothing.
        """
        return last or (
            self._models(self._comm) if self._weighted else before or [part.gather() for part in self._parts]
        )

    def _anchors(self) -> list[Tensor]:
        return [part[self.anchors[0]] for part in self._parts]

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

    def _checked(self, weight: float | None) -> float:
        if weight is None and not self._weighted:
            return 1.0
        if not self._weighted:
            raise ValueError(f"average(weight={weight}), but means are plain: make the {self._what} with weighted=True")
        if weight is None:
            raise ValueError(f"average() of a weighted {self._what}: give the step's weight, such as len(batch)")
        if number("weight", weight) < 0:
            raise ValueError(f"weight is {weight}, expected 0 or more")
        return float(weight)

    def _refuse_shown(self, what: str) -> None:
        if self._showing:
            raise RuntimeError(
                f"{what} inside averaged_model(), where the parameters are not this rank's: leave it first"
            )

    def _refuse_misfits(self) -> None:
        """At a boundary: ranks or parameters that are no longer those of the beginning."""
        if self._by_default and self._comm.size == 1:
            refuse_alone(f"a {self._what}")
        refuse_changes(self.optimizer, self._names, list(self._trained.values()), what=self._what)

    def _refuse_unended(self) -> None:
        self._refuse_shown("drain() and finish()")
        if self._unseen:
            raise RuntimeError(f"{self._unseen} steps since the last average(): call that after every step, then end")

    def _refuse_undrained(self, unfinished: int) -> None:
        raise RuntimeError(
            f"drain() is for all ranks at the same point, but {unfinished} of {self._comm.size} went on with "
            "average(): a rank that has no more steps calls finish()"
        )

    def _refuse_other_parameters(self) -> None:
        """The first time after a state was loaded."""
        if self._expected is not None:
            saved.refuse_other_parameters(self._expected, self._trained)
            self._expected = None
