"""From the gradients of this rank to their mean over all ranks, bucket by bucket: dense in, dense out.

An `Exchange` carries them and ends steps. How a bucket's gradient travels, and what is kept of it between steps, is
its `Scheme`'s: whole gradients (`WholeGradients`), or selections with error feedback (`Selections`). Another one is
one file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from communicators import Bucket, Communicator, Schedule, Work, run, start
from communicators.labels import labelled
from communicators.replicas.by_parameter import empty_like, split
from sparse_compress.nonfinite import all_finite
from torch import Tensor

from sparse_collectives.training.clipping import clip_limit, clip_together
from sparse_collectives.training.memories import MEMORIES
from sparse_collectives.training.nonfinite import Checked, checked, refuse_nonfinite, unlawful
from sparse_collectives.training.tally import Exchanged, Tally


class Transfer(Protocol):
    """One bucket's gradient on its way to the mean, in one step. R is what its schedule returns."""

    @property
    def facts(self) -> str:
        """What the ranks must share, as text."""

    @property
    def schedule(self) -> Schedule[Any]:
        """What carries it; asked for once."""

    @property
    def summed(self) -> Tensor | None:
        """A tensor of which R is the plain sum over the ranks, where the transport's own allreduce may do as well."""

    def agreed(self, result: Any) -> Tensor:
        """What of R is the same on every rank: where a NaN or inf of any rank shows."""

    def own(self, result: Any) -> Tensor:
        """What of R only this rank has and keeps: to be finite where `agreed` is."""

    def suspect(self) -> int:
        """The first element in the bucket of which this rank gave something not finite, −1 if none."""

    def end(self, result: Any, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean as `flat` is, which it may overwrite, and of the mean what may be other than zero.

        Args:
            result: R.
            flat: This rank's gradient, 1-D, in its own dtype.
        """


class Scheme(Protocol):
    """How gradients become means, and what is kept between steps, by bucket; keys name buckets.

    Attributes:
        memories: Which of "residuals" and "velocities" are kept, tensors of a bucket's shape that belong to its
            parameters.
    """

    memories: Sequence[str]

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """A bucket that is not known yet.

        Args:
            key: Its name.
            bucket: Its parameters.
            kept: What was kept of them, flat, by memory; {} if nothing.
        """

    def forget(self, key: str) -> dict[str, Tensor]:
        """Lets go of a bucket; only between steps.

        Args:
            key: Its name.

        Returns:
            What was kept, flat, by memory.
        """

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """One bucket of a step.

        Args:
            key: Its name.
            flat: The gradient, 1-D, in its own dtype.
            scale: It is so many times the one that counts.
            unused: Spans of it that take no part.
        """

    def commit(self) -> None:
        """The step stands."""

    def rollback(self) -> None:
        """As if the step had not been, bit for bit; only where steps may be skipped."""

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """By memory and bucket: references."""

    def state_dict(self) -> dict[str, Any]:
        """What else is kept, in plain values."""

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets, and goes on with what `state_dict` gave.

        Args:
            state: Of another one, with "residuals" and "velocities" by parameter.

        Raises:
            ValueError: It does not fit; nothing is changed.
        """


@runtime_checkable
class LooksInside(Protocol):
    """A scheme whose residuals can be looked at while a step is under way, too."""

    def residuals_now(self) -> Sequence[Tensor]:
        """As they are now, of a step that may still be undone as well: references."""


@runtime_checkable
class BeginsWhole(Protocol):
    """A scheme whose first steps are summed whole, so that they save nothing."""

    @property
    def dense_steps_left(self) -> int:
        """How many of them are still to come."""


class Exchange:
    """Means of buckets, and the steps that they make up.

    names: of the parameters, which buckets have by position; the list may grow. owner: in messages, whose.
    nonfinite: "raise": a NaN or inf of any rank is an error on all of them, raised by each `Work`'s wait. "skip":
        `settle` tells whether the step stands, and undoes it where not. "pass": nobody looks.
    native: whole sums are left to the transport, where it has one, when their `Work` is waited for.
    clip_norm: of the mean, which `clip` reaches for by the ranks' own gradients; None: `clip` does nothing.
    what: is exchanged, in messages.
    cut: a fact, as text: how parameters were cut into buckets, where ranks could do it otherwise.
    shared: another, of this step: what ranks must hold alike.
    selection_seconds: until now, on this rank, by the communicator's clock.
    tally: what exchanges have cost so far. Who starts them says when it begins to wait for them.
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
        """Clips this rank's gradients in place, before they are started; `scale` times those that count.

        of: elements of the whole model, where these are a part of it. Each part's norm is held to √share of the limit,
        and so the whole one's to the limit, whatever the parts hold of it (`clip_limit`).
        """
        if self._clip_norm is not None:
            share = 1.0 if of is None else sum(flat.numel() for flat in flats) / of
            clip_together(flats, scale * clip_limit(self._clip_norm, self.comm.size) * math.sqrt(share))

    def start(self, bucket: Bucket, flat: Tensor, *, scale: float = 1.0, unused: Sequence[slice] = ()) -> Work[Tensor]:
        """Starts one bucket: `flat`, 1-D, belongs to the exchange until the work, its mean, has been waited for.

        scale: of the loss; residuals are without it. unused: spans whose residuals wait; their gradient is zero.
        """
        key = self.register(bucket)
        began = self.comm.clock()
        with labelled("select"):
            transfer = self.scheme.transfer(key, flat, scale, unused)
        self.selection_seconds += self.comm.clock() - began
        native, dense = self._native and transfer.summed is not None, self._whole_nbytes(flat)
        tallied = self.tally.begin(dense=dense)
        later = partial(self._sum, transfer, bucket, tallied)
        work: Work[Checked] = _Later(later, self.comm.clock) if native else self._launch(transfer, bucket, tallied)
        tallied.work = work
        return _Mean(work, partial(self._end, transfer, flat))

    def register(self, bucket: Bucket) -> str:
        """The name of a bucket; if its parameters were cut otherwise before, what was kept of them moves here."""
        key = self._names[bucket.members[0]]
        if self._buckets.get(key) == bucket:
            return key
        for old_key, old in list(self._buckets.items()):
            if set(old.members) & set(bucket.members):
                if self._agreed:  # a skipped step could not be undone in other buckets
                    self.settle()
                for memory, flat in self.scheme.forget(old_key).items():
                    self._pool[memory].update(split({old_key: flat}, self._buckets, self._names))
                del self._buckets[old_key]
        kept = {memory: self._out_of_pool(bucket, memory) for memory in self.scheme.memories}
        self.scheme.register(key, bucket, {memory: flat for memory, flat in kept.items() if flat is not None})
        self._buckets[key] = bucket
        return key

    def settle(self) -> bool:
        """Ends the step, on every rank alike: whether it stands, or was undone because a mean is not finite."""
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
        """Whether the means of this step are so far, where steps may be skipped; without ending it."""
        return not self._agreed or bool(torch.stack(self._agreed).all())

    def undo(self) -> None:
        """Ends a step that has failed: what can be taken back is."""
        self._agreed, self._own = [], []
        if self._nonfinite == "skip":
            self.scheme.rollback()

    @property
    def left_over(self) -> list[str]:
        """Parameters of which something was loaded, but no bucket has brought them."""
        return sorted(self._pool["residuals"])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the parameters that buckets have brought, by name."""
        return {
            self._names[member]: shape
            for bucket in self._buckets.values()
            for member, shape in zip(bucket.members, bucket.shapes, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """What is kept, by parameter, and the scheme's own state: references."""
        return {**{memory: self.kept(memory) for memory in MEMORIES}, **self.scheme.state_dict()}

    def kept(self, memory: str) -> dict[str, Tensor]:
        """One of `MEMORIES`, by parameter: references."""
        by_bucket = self.scheme.kept().get(memory, {})
        return {**self._pool[memory], **split(by_bucket, self._buckets, self._names)}

    def load_state_dict(self, state: Mapping[str, Any], algorithm: str) -> None:
        """Replaces all by copies of what an adapter's state has. Raises ValueError, before anything is changed.

        algorithm: The one in use: what another has learnt about its ranks is left out.
        """
        if state["algorithm"] != algorithm:
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
        """What all has cost so far; see `communicators.stats.Stats`."""
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
        """What the best dense allreduces send of it."""
        return 2 * whole.numel() * whole.element_size() * (self.comm.size - 1) // self.comm.size

    def _launch(self, transfer: Transfer, bucket: Bucket, tallied: Exchanged) -> Work[Checked]:
        facts = self._facts(transfer)
        schedule = tallied.counted(self._looked_at(transfer.schedule, transfer, bucket))
        return start(schedule, self.comm, facts=facts, device=bucket.device)

    def _sum(self, transfer: Transfer, bucket: Bucket, tallied: Exchanged) -> Checked:
        """The plain sum, by the transport where it has one."""
        assert transfer.summed is not None
        total = self.comm.native_allreduce(transfer.summed, facts=self._facts(transfer))
        if total is None:
            return self._launch(transfer, bucket, tallied).wait()
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
        return f"{transfer.facts} in {self._owner}{self._loaded}{self.cut}{self.shared}"

    def _end(self, transfer: Transfer, flat: Tensor, outcome: Checked) -> Tensor:
        result, error = outcome
        if error is not None:
            raise error
        with labelled("restore"):
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
    """A work whose result is put back once, by whoever asks first."""

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
    """Done when it is waited for."""

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
