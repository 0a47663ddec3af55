"""`PeriodicAveraging`: what a user of the family does with it: steps, boundaries, the end, the model, checkpoints."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from communicators import Stats, as_communicator
from communicators.replicas.buffers import Buffers
from communicators.replicas.gathered import gathered_state
from communicators.replicas.inside_ddp import InsideDDP
from communicators.replicas.replaced import Replaced
from communicators.replicas.unended import Unended
from communicators.replicas.wrapped_state import refuse_torch_helpers
from torch import nn
from torch.optim import Optimizer

from local_sgd import beginning, figures, saved
from local_sgd.block import Block, Every
from local_sgd.boundaries import Boundaries
from local_sgd.inner_state import InnerState
from local_sgd.levels import Near
from local_sgd.options import check_options
from local_sgd.parts import parts_of, shown
from local_sgd.settings import number

INSIDE_A_NODE = "; DDP inside each node alone, by process_group= of its ranks, is as it should be"


class PeriodicAveraging(Boundaries):
    """Wraps an optimizer: its steps are local, and after every τ of them ranks exchange a mean of their models.

        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4)
        for ...:
            loss.backward()
            optimizer.step(); optimizer.zero_grad(); optimizer.average()
        optimizer.finish()

    x is a rank's model, x̄ the mean over ranks, and "boundary" after every τ-th `average`.

    Parameters of 16 bits are averaged in 32, and what is rounded off then stays with the rank that rounds.
    Frozen parameters (requires_grad False, now) are left out; freezing or adding some later is an error.
    Where DDP wraps the module among the same ranks it exchanges every gradient anyway, which is warned about.

    Args:
        optimizer: Any, built over the live parameters; this object shares its param_groups, state and defaults.
        sync_every: τ, or a function that gives it from the number of steps before the block, such as a warm-up:
            `lambda step: 1 if step < 1000 else 16`. Ranks may have different ones: their blocks are exchanged in order.
        comm: See `communicators.as_communicator`; its `timeout` is how long a boundary waits for a late rank.
        model: Names parameters in errors, and has buffers, see `buffers`.
        buffers: Of the model, such as BatchNorm's: "keep", every rank its own until `drain` or `finish` averages them;
            "average" at boundaries, what is not floating-point being rank 0's; "broadcast" rank 0's. Both wait for a
            small exchange at every boundary.
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
        check_options(buffers=buffers, inner_state=inner_state, bucket_bytes=bucket_bytes, model=model)
        self._block = Block(sync_every)
        super().__init__(optimizer)
        self._what, self._native = (what := type(self).__name__), native
        self._refuse_native()
        named = beginning.named_parameters(optimizer, model, needs_rate=self.needs_rate, what=what)
        given, self._comm = comm, as_communicator(comm)
        self._by_default = given is None
        self.check()
        self._weighted, self._model = bool(weighted), model
        self._names = {id(p): name for name, p in named.items()}
        self._trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
        self._inside_ddp = InsideDDP(self._trained.values(), given, owner=what, instead=INSIDE_A_NODE)
        self._replaced, self._unended = Replaced(self._trained, what), Unended(self)
        self._said = self._shared_settings(buffers, inner_state)
        agreed = {**self._said, "bucket_bytes": bucket_bytes}
        beginning.agree(named, model, self._comm, what, agreed, broadcast=broadcast)
        device = None if anchor_device is None else torch.device(anchor_device)
        groups, pieces = optimizer.param_groups, self.pieces()
        self._parts = [part for piece in pieces for part in parts_of(groups, piece, bucket_bytes, device)]
        self._near = None if self.inner is None else Near(self.inner, self._comm, what, native=native)
        self._sums = self.compression.sum_of(self._parts, self._comm, what) if self.compression else None
        self._averaging = self.averaging_of(self._parts)
        self._buffers = Buffers(model, buffers, self._comm, what)
        self._inner = InnerState(inner_state, optimizer, self._comm, what)
        self._begin()
        optimizer.register_step_pre_hook(partial(_departs, weakref.ref(self)))
        self._sent_before, self._steps_before = self._sent, 0
        self._showing, self._expected, self._loaded, self._unseen, self._warned = False, None, False, 0, False

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
        return figures.hidden_fraction(self.averagings())

    def stats(self) -> Stats:
        """What training has cost and saved since this optimizer was made, on this rank; nothing is exchanged for it.

        Returns:
            Plain numbers for any logger; `str` says them in a line. See `communicators.Stats`, and:

            - boundaries: At which ranks have met.
            - bytes_sent: Over `comm`, also by others that use it, and over its small group if there are two levels.
        """
        taken, size = self._block.steps - self._steps_before, self._comm.size
        nbytes = sum(p.numel() * p.element_size() for p in self._trained.values())
        counted = {"steps": self._block.steps, "boundaries": self._block.boundaries}
        sent = {"bytes_sent": self._sent - self._sent_before, "bytes_dense": taken * (2 * nbytes * (size - 1) // size)}
        return Stats({**counted, **sent, **figures.seconds(self.averagings())})

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
        self._replaced.refuse()
        self._refuse_other_parameters()
        self._inside_ddp.look()
        self._unseen, self._unended.steps = self._unseen + 1, self._unended.steps + 1
        self._warn_unseen()
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def average(self, weight: float | None = None) -> None:
        """Counts a step; at a boundary exchanges. Call it after every step, also after one that a GradScaler left out.

        Args:
            weight: Of this step, such as its number of samples; given if, and only if, the optimizer is `weighted`.
        """
        weight = self._counted(weight)
        last = self._block.count(weight)
        if self._near is not None:
            if self._near.block.count(weight):
                self._sync_near(self._near, finished=False)
            last = self._near.is_due
        if last:
            self._sync_all()

    def drain(self) -> None:
        """Ends the block now, and what is under way; then every rank holds the model, in the same bits, and buffers.

        For all ranks, at the same point. A rank that has fewer blocks than others calls `finish`.
        """
        self._refuse_unended()
        self._end(most=2 if self.overlaps else 1)

    def finish(self) -> None:
        """This rank has no more steps: takes part in the others' boundaries until all have finished; then as `drain`.

        Ranks may come with different numbers of steps. After its last block a rank that has finished is left
        out of the means, and goes where the others go. Training may go on afterwards.
        """
        self._refuse_unended()
        self._end(most=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`finish`, unless an exception leaves."""
        if kind is None:
            self.finish()
        self._unended.steps = 0

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
        with self._buffers.shared(comm), shown(self._parts, models):
            self._showing = True
            try:
                yield self._model
            finally:
                self._showing, self._unended.steps = False, 0

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, as "distributed", all else: each rank saves its own, and its own model.

        What is under way is waited for and stored, not applied. References; loadable by torch.load(weights_only=True).
        """
        refuse_torch_helpers(self._what)
        self._refuse_shown("state_dict()")
        self._refuse_other_parameters()
        arrived = self._averaging.arrived() if self.overlaps else None
        self._unended.steps = 0
        return saved.state_dict(self, self._parts, self._block, arrived, drained=self._drained)

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, for a checkpoint that rank 0 alone writes; for every rank to call.

        On rank 0, which holds it in the CPU's memory; {} elsewhere. Every rank loads it by `load_state_dict`, which
        takes its own part. Each rank's model is its own too, and is not in it. Loadable by
        torch.load(weights_only=True).

        Raises:
            CollectiveError: `state_dict` raises on another rank, which is named.
        """
        return gathered_state(self.state_dict, self._comm, advice=saved.ANEW, alike=False)

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
            TypeError: It is no state, such as None or a list.
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

    def _refuse_native(self) -> None:
        if self._native and self.overlaps:
            raise ValueError(f"native=True waits for the transport, but {self._what} goes on meanwhile: leave it out")
        if self._native and self.compression:
            raise ValueError(
                f"native=True is the transport's sum, and compress={self.compression!r} another: leave one out"
            )

    def _shared_settings(self, buffers: str, inner_state: str) -> dict[str, Any]:
        """What all ranks must have said alike."""
        shared = {name: getattr(self, name) for name in self.settings}
        shared |= {"buffers": buffers, "inner_state": inner_state, "weighted": self._weighted, "native": self._native}
        shared |= {"compress": self.compression} if self.compression else {}
        return shared | ({"levels": self.inner} if self.inner else {})

    def _counted(self, weight: float | None) -> float:
        """The weight of a step that is over."""
        self._refuse_shown("average()")
        self._depart()
        self._unseen = 0
        return self._checked(weight)

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

    def _refuse_unended(self) -> None:
        self._refuse_shown("drain() and finish()")
        if self._unseen:
            raise RuntimeError(f"{self._unseen} steps since the last average(): call that after every step, then end")
        self._depart()

    def _warn_unseen(self) -> None:
        """Once, where a boundary would have been."""
        block = self._block if self._near is None else self._near.block
        if self._unseen >= max(2, block.length) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._unseen} steps of {self._what} since the last average(), which counts them: ranks exchange "
                "nothing, and go apart. Call optimizer.average() after every optimizer.step()",
                stacklevel=4,
            )

    def _refuse_other_parameters(self) -> None:
        """The first time after a state was loaded."""
        if self._expected is not None:
            saved.refuse_other_parameters(self._expected, self._trained)
            self._expected = None


def _departs(wrapper: weakref.ref[PeriodicAveraging], *_: Any) -> None:
    """Before a step of the wrapped optimizer, whoever takes it. It must not keep one alive that was replaced."""
    living = wrapper()
    if living is not None:
        living._depart()
