"""Exchange of this rank's gradients for their mean over all ranks, bucket by bucket: dense in, dense out.

An `Exchange` carries them and ends steps. Its `Scheme` decides how a bucket's gradient travels, and what is kept
between steps: dense gradients (`WholeGradients`), or selections with error feedback (`Selections`). A new scheme is
one file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from communicators import Bucket, Communicator, Schedule, Work, run, start, tracing
from replicas.by_parameter import empty_like, split
from sparse_collectives.algorithm import Algorithm
from sparse_compress.nonfinite import all_finite
from torch import Tensor

from data_parallel.clipping import clip_limit, clip_together
from data_parallel.memories import MEMORIES
from data_parallel.nonfinite import Checked, checked, refuse_nonfinite, unlawful
from data_parallel.tally import Exchanged, Tally


class Transfer(Protocol):
    """One bucket's gradient on its way to the mean, in one step. R is what its schedule returns."""

    @property
    def facts(self) -> str:
        """Facts that all ranks share, as text."""

    @property
    def schedule(self) -> Schedule[Any]:
        """Schedule that carries the transfer; read once."""

    @property
    def summed(self) -> Tensor | None:
        """A tensor of which R is the plain sum over the ranks, where the transport's own allreduce may do as well."""

    def agreed(self, result: Any) -> Tensor:
        """The part of R that is the same on every rank, in which any rank's NaN or inf shows."""

    def own(self, result: Any) -> Tensor:
        """The part of R that only this rank has and keeps; must be finite if `agreed` is."""

    def suspect(self) -> int:
        """The first element in the bucket of which this rank gave something not finite, −1 if none."""

    def end(self, result: Any, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean in the form of `flat`, which it may overwrite, and the part of the mean that may be nonzero.

        Args:
            result: R.
            flat: This rank's gradient, 1-D, in its own dtype.
        """


class Scheme(Protocol):
    """How gradients become means, and what is kept between steps, by bucket; keys name buckets.

    Attributes:
        name: The algorithm's, in facts, errors and checkpoints.
        settings: Its options, as text that all ranks must share.
        wire: The one in use.
        entry: The sparse allreduce, or that of "dense"; None for one that sends something of every element.
        keeps: Which of "residuals" and "velocities" are kept, tensors of a bucket's shape that belong to its
            parameters.
    """

    name: str
    settings: Sequence[str]
    wire: str
    entry: Algorithm | None
    keeps: Sequence[str]

    @property
    def selects(self) -> bool:
        """Whether entries are selected, as many as the compressor says."""
        return self.entry is not None and self.entry.selects

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket that is not known yet.

        Args:
            key: Its name.
            bucket: Its parameters.
            kept: Their memories, flat, by name; {} if there are none.
        """

    def forget(self, key: str) -> dict[str, Tensor]:
        """Lets go of a bucket; only between steps.

        Args:
            key: Its name.

        Returns:
            Its memories, flat, by name.
        """

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """One bucket of a step.

        Args:
            key: Its name.
            flat: The gradient, 1-D, in its own dtype.
            scale: Loss scale of the gradient.
            unused: Spans of it that take no part.
        """

    def commit(self) -> None:
        """Commits the step."""

    def rollback(self) -> None:
        """Undoes the step, bit for bit; only where steps may be skipped."""

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Memories by name and bucket: references."""

    def state_dict(self) -> dict[str, Any]:
        """State besides the memories, in plain values."""

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets, and continues from a `state_dict`.

        Args:
            state: Another scheme's, with "residuals" and "velocities" by parameter.

        Raises:
            ValueError: It does not fit; nothing is changed.
        """


@runtime_checkable
class LooksInside(Protocol):
    """A scheme whose residuals can be looked at while a step is under way, too."""

    def residuals_now(self) -> Sequence[Tensor]:
        """Current residuals, even of a step that may still be undone: references."""


@runtime_checkable
class BeginsWhole(Protocol):
    """A scheme whose first steps are summed dense, so that they save nothing."""

    @property
    def dense_steps_left(self) -> int:
        """Number of dense steps still to come."""


class Exchange:
    """Means of buckets, and the steps that they make up.

    names: names of the parameters, which buckets refer to by position; the list may grow. owner: the owner's name in
        messages.
    nonfinite: "raise": a NaN or inf of any rank is an error on all of them, raised by each `Work`'s wait. "skip":
        `commit_or_rollback` tells whether the step stands, and otherwise undoes it. "pass": nothing is checked.
    native: dense sums are left to the transport, if it has its own, when their `Work` is waited for.
    clip_norm: target norm of the mean, which `clip` approaches by clipping ranks' own gradients; None: `clip` does
        nothing.
    what: name in messages of the exchanged tensors.
    cut: a fact, as text: how parameters were cut into buckets, if ranks could differ in that.
    shared: another fact, about this step: values that ranks must share.
    selection_seconds: seconds so far on this rank, by the communicator's clock.
    tally: costs of exchanges so far. The caller that starts them says when it begins to wait for them.
    """

    def __init__(
        self,
        scheme: Scheme,
        comm: Communicator,
        names: Sequence[str],
        *,
        owner: str,
        nonfinite: str,
        native: bool = False,
        clip_norm: float | None = None,
        what: str = "gradient",
    ) -> None:
        self.scheme, self.comm, self._what = scheme, comm, what
        self.keeps = scheme.keeps
        self._clip_norm = clip_norm
        self._names, self._owner, self._nonfinite, self._native = names, owner, nonfinite, native
        self._loaded = ""  # a fact: residuals that only some ranks have loaded are lost on the others
        self.cut = self.shared = ""
        self._buckets: dict[str, Bucket] = {}  # by the name of their first member
        self._pool: dict[str, dict[str, Tensor]] = {memory: {} for memory in MEMORIES}  # of no bucket yet, by parameter
        self._agreed: list[Tensor] = []  # of this step, by bucket, 0-D bool: a GPU is asked once, at its end
        self._own: list[Tensor] = []
        self.selection_seconds = 0.0
        self.tally = Tally(comm.clock)

    def clip(self, flats: Sequence[Tensor], *, scale: float = 1.0, of: int | None = None) -> None:
        """Clips this rank's gradients, which have the loss scale `scale`, in place before they are started.

        of: elements of the whole model, if these are a part of it. Each part's norm is limited to √share of the limit,
        which limits the whole model's norm however it is spread over the parts (`clip_limit`).
        """
        if self._clip_norm is not None:
            share = 1.0 if of is None else sum(flat.numel() for flat in flats) / of
            clip_together(flats, scale * clip_limit(self._clip_norm, self.comm.size) * math.sqrt(share))

    def start(self, bucket: Bucket, flat: Tensor, *, scale: float = 1.0, unused: Sequence[slice] = ()) -> Work[Tensor]:
        """Starts one bucket: `flat`, 1-D, belongs to the exchange until the work, its mean, has been waited for.

        scale: loss scale; residuals are stored without it. unused: spans whose residuals wait; their gradient is zero.
        """
        key = self.register(bucket)
        began = self.comm.clock()
        with tracing.labelled("select"):
            transfer = self.scheme.transfer(key, flat, scale, unused)
        self.selection_seconds += self.comm.clock() - began
        native, dense = self._native and transfer.summed is not None, self._whole_nbytes(flat)
        tallied = self.tally.begin(dense=dense)
        later = partial(self._sum, transfer, bucket, tallied)
        work: Work[Checked] = _Later(later, self.comm.clock) if native else self._launch(transfer, bucket)
        tallied.work = work
        return _Mean(work, partial(self._end, transfer, flat))

    def register(self, bucket: Bucket) -> str:
        """Name of a bucket; if its parameters were cut differently before, their memories move here."""
        key = self._names[bucket.members[0]]
        if self._buckets.get(key) == bucket:
            return key
        for old_key, old in list(self._buckets.items()):
            if set(old.members) & set(bucket.members):
                if self._agreed:  # a skipped step could not be undone in other buckets
                    self.commit_or_rollback()
                for memory, flat in self.scheme.forget(old_key).items():
                    self._pool[memory].update(split({old_key: flat}, self._buckets, self._names))
                del self._buckets[old_key]
        kept = {memory: self._out_of_pool(bucket, memory) for memory in self.keeps}
        self.scheme.register(key, bucket, {memory: flat for memory, flat in kept.items() if flat is not None})
        self._buckets[key] = bucket
        return key

    def commit_or_rollback(self) -> bool:
        """Ends the step, in the same way on every rank; returns False if it was undone because a mean is not finite."""
        agreed, own = self._agreed, self._own
        self._agreed, self._own = [], []
        if agreed and not bool(torch.stack(agreed).all()):
            self.scheme.rollback()
            return False
        if own and not bool(torch.stack(own).all()):
            raise unlawful(self._owner, self.comm.rank)
        self.scheme.commit()
        return True

    def finite(self) -> bool:
        """Whether all means of this step are finite so far, if steps may be skipped; does not end it."""
        return not self._agreed or bool(torch.stack(self._agreed).all())

    def undo(self) -> None:
        """Ends a step that has failed, and takes back what it can."""
        self._agreed, self._own = [], []
        if self._nonfinite == "skip":
            self.scheme.rollback()

    def begin_waiting(self) -> None:
        """Notes that this rank does nothing but wait from now on."""
        self.tally.begin_waiting()

    @property
    def left_over(self) -> list[str]:
        """Parameters with loaded residuals that no bucket has brought."""
        return sorted(self._pool["residuals"])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that buckets have brought, by name."""
        return {
            self._names[member]: shape
            for bucket in self._buckets.values()
            for member, shape in zip(bucket.members, bucket.shapes, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Memories by parameter, and the scheme's own state: references."""
        return {**{memory: self.error_state(memory) for memory in MEMORIES}, **self.scheme.state_dict()}

    def error_state(self, memory: str) -> dict[str, Tensor]:
        """One of `MEMORIES`, by parameter: references."""
        by_bucket = self.scheme.kept().get(memory, {})
        return {**self._pool[memory], **split(by_bucket, self._buckets, self._names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything by copies from an adapter's state. Raises ValueError before anything is changed.

        Another algorithm's own state is left out.
        """
        if state["algorithm"] != self.scheme.name:
            state = {**state, "algorithm_state": []}
        refuse_nonfinite(state)
        pool = {memory: {name: tensor.clone() for name, tensor in state[memory].items()} for memory in MEMORIES}
        self.scheme.reset(state)
        buckets, self._buckets, self._pool = self._buckets, {}, pool
        self._agreed, self._own = [], []
        self._loaded = f" with a state of {state['steps']} steps loaded" if "steps" in state else " with a state loaded"
        for bucket in buckets.values():
            self.register(bucket)

    def stats(self) -> dict[str, float]:
        """Total costs so far; see `communicators.Stats`."""
        whole = {"dense_steps_left": self.scheme.dense_steps_left} if isinstance(self.scheme, BeginsWhole) else {}
        return {
            **self.tally.numbers(),
            **whole,
            "seconds_selecting": self.selection_seconds,
            "residual_norm": self._residual_norm(),
        }

    def _residual_norm(self) -> float:
        looks = self.scheme.residuals_now if isinstance(self.scheme, LooksInside) else None
        residuals = list(self.scheme.kept().get("residuals", {}).values()) if looks is None else looks()
        return math.sqrt(sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in residuals))

    def _whole_nbytes(self, whole: Tensor) -> int:
        """Bytes that the best dense allreduces send for this tensor."""
        return 2 * whole.numel() * whole.element_size() * (self.comm.size - 1) // self.comm.size

    def _launch(self, transfer: Transfer, bucket: Bucket) -> Work[Checked]:
        facts = self._facts(transfer)
        schedule = self._looked_at(transfer.schedule, transfer, bucket)
        return start(schedule, self.comm, facts=facts, device=bucket.device)

    def _sum(self, transfer: Transfer, bucket: Bucket, tallied: Exchanged) -> Checked:
        """The plain sum, by the transport where it has one."""
        assert transfer.summed is not None
        total = self.comm.native_allreduce(transfer.summed, facts=self._facts(transfer))
        if total is None:
            work = self._launch(transfer, bucket)
            outcome = work.wait()
            tallied.sent += work.bytes_sent
            return outcome
        tallied.sent += self._whole_nbytes(total)
        if self._nonfinite != "raise" or bool(all_finite(total)):
            return total, None
        again = self._looked_at(_done(total), transfer, bucket)
        return run(again, self.comm, facts=f"what is not finite in {transfer.facts}", device=bucket.device)

    def _looked_at(self, schedule: Schedule[Any], transfer: Transfer, bucket: Bucket) -> Schedule[Checked]:
        if self._nonfinite != "raise":
            return _unchecked(schedule)
        where, place = self._facts(transfer), (self.comm.rank, self.comm.size)
        return checked(schedule, transfer, bucket, self._names, *place, where=where, what=self._what)

    def _facts(self, transfer: Transfer) -> str:
        return f"{transfer.facts} in {self._owner}{self.shared}{self._loaded}{self.cut}"

    def _end(self, transfer: Transfer, flat: Tensor, outcome: Checked) -> Tensor:
        result, error = outcome
        if error is not None:
            raise error
        with tracing.labelled("restore"):
            mean, seen = transfer.end(result, flat)
        if self._nonfinite == "skip":
            self._agreed.append(all_finite(seen))
            self._own.append(all_finite(transfer.own(result)))
        return mean

    def _out_of_pool(self, bucket: Bucket, memory: str) -> Tensor | None:
        """The members' residuals or velocities as one flat tensor, zeros where there is none; None without any."""
        found: dict[int, Tensor | None] = {}
        for member, shape in zip(bucket.members, bucket.shapes, strict=True):
            tensor = found[member] = self._pool[memory].pop(self._names[member], None)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{memory} of {self._names[member]!r}: {tuple(tensor.shape)}, expected {tuple(shape)}")
        if all(tensor is None for tensor in found.values()):
            return None
        return bucket.gather(found, out=empty_like(bucket))


class _Mean(Work[Tensor]):
    """A work whose result is put back once, at the first request."""

    def __init__(self, work: Work[Checked], end: Any) -> None:
        self._work, self._end = work, end
        self._mean: Tensor | None = None

    @property
    def began(self) -> float:
        return self._work.began

    @property
    def ended(self) -> float | None:
        return self._work.ended

    def wait(self, timeout: float | None = None) -> Tensor:
        return self._ended(self._work.wait(timeout))

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Tensor]:
        return self._work.get_future().then(lambda _: self.wait())

    def _ended(self, outcome: Checked) -> Tensor:
        if self._mean is None:
            self._mean = self._end(outcome)
        return self._mean


class _Later(Work[Checked]):
    """A work that runs when it is waited for; its call counts its bytes."""

    bytes_sent = 0

    def __init__(self, call: Callable[[], Checked], clock: Callable[[], float]) -> None:
        self._call, self._clock = call, clock
        self._began, self._ended = clock(), cast(float | None, None)

    @property
    def began(self) -> float:
        return self._began

    @property
    def ended(self) -> float | None:
        return self._ended

    def wait(self, timeout: float | None = None) -> Checked:
        del timeout
        self._began = self._clock()
        outcome = self._call()
        self._ended = self._clock()
        return outcome

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[Checked]:
        raise NotImplementedError("a sum by the transport's own allreduce is waited for")


def _done(result: Any) -> Schedule[Any]:
    """A schedule that has its result already."""
    yield from ()
    return result


def _unchecked(schedule: Schedule[Any]) -> Schedule[Checked]:
    return (yield from schedule), None
