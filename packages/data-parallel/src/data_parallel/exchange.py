"""Exchange of this rank's gradients for their mean over all ranks, bucket by bucket: dense in, dense out.

An `Exchange` has a lane for each bucket, and ends steps: a lane decides how its gradient travels, and owns what is kept
of it between steps. `Means` takes all tensors of a model through an exchange.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from communicators import Bucket, CollectiveError, Communicator, Schedule, Work, run, start, tracing
from sparse_compress import all_finite
from torch import Tensor

from data_parallel.clipping import clip_limit, clip_together
from data_parallel.lanes import ERROR_STATE, Lane, Saved, Scheme, Sending, State, empty_like
from data_parallel.nonfinite import culprit, refuse_nonfinite, unlawful
from data_parallel.tally import Tally

Checked = tuple[Any, CollectiveError | None]
"""A schedule's result, and the error that every rank is to raise where it is not finite."""


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
    keeps: those of `ERROR_STATE` that the scheme keeps.
    cut: a fact, as text: how parameters were cut into buckets, if ranks could differ in that.
    shared: another fact, about this step: values that ranks must share.
    selection_seconds: seconds so far on this rank, by the communicator's clock.
    begin_waiting: to be called when this rank has nothing else to do than wait for what it has started.
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
        self.scheme, self.comm, self.names, self.what = scheme, comm, names, what
        self.nonfinite, self.native, self.keeps = nonfinite, native, scheme.keeps
        self._owner, self._clip_norm = owner, clip_norm
        self._loaded = ""  # a fact: residuals that only some ranks have loaded are lost on the others
        self.cut = self.shared = ""
        self._lanes: dict[int, Lane] = {}  # by first member
        self._open: list[Lane] = []  # those of this step, as they were first used in it
        self._error_state: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}  # of no lane, by parameter
        self._states: dict[str, State] = {}  # of the algorithm, loaded, of no lane yet
        self.totals_finite: list[Tensor] = []  # of this step, by bucket, 0-D bool: a GPU is asked once, at its end
        self.dropped_finite: list[Tensor] = []
        self.selection_seconds = 0.0
        self._tally = Tally(comm.clock)
        self.begin_waiting = self._tally.begin_waiting

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
        lane = self.open(bucket)
        if lane not in self._open:
            self._open.append(lane)
        began = self.comm.clock()
        with tracing.labelled("select"):
            sending = lane.send(flat, scale, unused)
        self.selection_seconds += self.comm.clock() - began
        mean = _Mean(self, lane, sending, f"{sending.facts} in {self._owner}{self.shared}{self._loaded}{self.cut}")
        self._tally.add(mean, dense=2 * flat.nbytes * (self.comm.size - 1) // self.comm.size)
        return mean

    def open(self, bucket: Bucket) -> Lane:
        """The bucket's lane; if its parameters were cut differently before, their error state moves here."""
        first = bucket.members[0]
        if first in self._lanes and self._lanes[first].bucket == bucket:
            return self._lanes[first]
        for old in [one for one in self._lanes.values() if not set(one.bucket.members).isdisjoint(bucket.members)]:
            if self.totals_finite:  # a skipped step could not be undone in other buckets
                self.commit_or_rollback()
            for kind, found in self._by_parameter([old]).items():
                self._error_state[kind].update(found)
            del self._lanes[old.bucket.members[0]]
            self._open = [lane for lane in self._open if lane is not old]
        key = self.names[first]
        kept = {kind: flat for kind in self.keeps if (flat := self._taken(bucket, kind)) is not None}
        lane = self._lanes[first] = self.scheme.open(bucket, Saved(key, kept, self._states.pop(key, None)))
        return lane

    def commit_or_rollback(self) -> bool:
        """Ends the step, in the same way on every rank; returns False if it was undone because a mean is not finite."""
        totals, dropped = self.totals_finite, self.dropped_finite
        self.totals_finite, self.dropped_finite = [], []
        if totals and not bool(torch.stack(totals).all()):
            self._rollback()
            return False
        if dropped and not bool(torch.stack(dropped).all()):
            raise unlawful(self._owner, self.comm.rank)
        for lane in self._open:
            lane.commit()
        self._open = []
        return True

    def finite(self) -> bool:
        """Whether all means of this step are finite so far, if steps may be skipped; does not end it."""
        return not self.totals_finite or bool(torch.stack(self.totals_finite).all())

    def undo(self) -> None:
        """Ends a step that has failed, and takes back what it can."""
        self.totals_finite, self.dropped_finite = [], []
        if self.nonfinite == "skip":
            self._rollback()

    @property
    def left_over(self) -> list[str]:
        """Parameters with loaded residuals that no bucket has brought."""
        return sorted(self._error_state["residuals"])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that buckets have brought, by name."""
        return {
            self.names[member]: shape
            for lane in self._lanes.values()
            for member, shape in zip(lane.bucket.members, lane.bucket.shapes, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Error state by parameter, the algorithm's by bucket, and what the scheme's lanes share: references.

        The algorithm's is a list, which torch.distributed.checkpoint loads as a whole.
        """
        states = self._states | {lane.key: lane.state for lane in self._lanes.values() if lane.state is not None}
        kept = {kind: self.error_state(kind) for kind in ERROR_STATE}
        return {**kept, "algorithm_state": list(states.items()), **self.scheme.state_dict()}

    def error_state(self, kind: str) -> dict[str, Tensor]:
        """One of `ERROR_STATE`, by parameter: references."""
        return {**self._error_state[kind], **self._by_parameter(self._lanes.values())[kind]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything by copies from an adapter's state. Raises ValueError before anything is changed.

        Another algorithm's own state is left out.
        """
        if state["algorithm"] != self.scheme.name:
            state = {**state, "algorithm_state": []}
        refuse_nonfinite({kind: state[kind] for kind in ERROR_STATE})
        error_state = {kind: {name: tensor.clone() for name, tensor in state[kind].items()} for kind in ERROR_STATE}
        states = copy.deepcopy(dict(state["algorithm_state"]))
        self.scheme.load_state_dict(state)
        self._error_state, self._states, lanes = error_state, states, list(self._lanes.values())
        self._lanes, self._open, self.totals_finite, self.dropped_finite = {}, [], [], []
        self._loaded = f" with a state of {state['steps']} steps loaded" if "steps" in state else " with a state loaded"
        for lane in lanes:
            self.open(lane.bucket)

    def stats(self) -> dict[str, float]:
        """Total costs so far, by the names of `communicators.stats.Stats`."""
        left = self.scheme.dense_steps_left
        residuals = [lane.residual for lane in self._lanes.values() if lane.residual is not None]
        squares = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in residuals]
        return {
            **self._tally.numbers(),
            **({} if left is None else {"dense_steps_left": left}),
            "seconds_selecting": self.selection_seconds,
            "residual_norm": math.sqrt(sum(squares)),
        }

    def _rollback(self) -> None:
        for lane in reversed(self._open):  # lanes share a compressor's state, which the first one saw before the step
            lane.rollback()
        self._open = []

    def _by_parameter(self, lanes: Iterable[Lane]) -> dict[str, dict[str, Tensor]]:
        """Error state of lanes, by parameter: views."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}
        for lane in lanes:
            for kind, flat in lane.error_state().items():
                for member, view in zip(lane.bucket.members, lane.bucket.views(flat), strict=True):
                    found[kind][self.names[member]] = view
        return found

    def _taken(self, bucket: Bucket, kind: str) -> Tensor | None:
        """The members' residuals or velocities as one flat tensor, zeros where there is none; None without any."""
        found: dict[int, Tensor | None] = {}
        for member, shape in zip(bucket.members, bucket.shapes, strict=True):
            tensor = found[member] = self._error_state[kind].pop(self.names[member], None)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{kind} of {self.names[member]!r}: {tuple(tensor.shape)}, expected {tuple(shape)}")
        if all(tensor is None for tensor in found.values()):
            return None
        return bucket.gather(found, out=empty_like(bucket))


class _Mean(Work[Tensor]):
    """A bucket's mean on its way; what was dropped goes back to its lane once, at the first request.

    began, ended, bytes_sent: of what carries it, once it was waited for.
    """

    began, bytes_sent = 0.0, 0
    ended: float | None = None

    def __init__(self, exchange: Exchange, lane: Lane, sending: Sending, facts: str) -> None:
        self._exchange, self._lane, self._sending, self._facts = exchange, lane, sending, facts
        self._mean: Tensor | None = None
        self.began = exchange.comm.clock()
        native = exchange.native and sending.summed is not None
        self._work = None if native else self._started()

    def wait(self, timeout: float | None = None) -> Tensor:
        if self._mean is None:
            try:
                result, error = self._summed() if self._work is None else self._work.wait(timeout)
            finally:
                if self._work is not None:
                    work = self._work
                    self.began, self.ended, self.bytes_sent = work.began, work.ended, work.bytes_sent
            if error is not None:
                raise error
            with tracing.labelled("restore"):
                self._mean, seen = self._lane.receive(self._sending, result)
            if self._exchange.nonfinite == "skip":
                self._exchange.totals_finite.append(all_finite(seen))
                self._exchange.dropped_finite.append(all_finite(self._lane.values(result)[1]))
        return self._mean

    def is_completed(self) -> bool:
        return self._work is not None and self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Tensor]:
        if self._work is None:
            raise NotImplementedError("a sum by the transport's own allreduce is waited for")
        return self._work.get_future().then(lambda _: self.wait())

    def _started(self) -> Work[Checked]:
        schedule = self._checked(self._sending.schedule)
        return start(schedule, self._exchange.comm, facts=self._facts, device=self._lane.bucket.device)

    def _summed(self) -> Checked:
        """The plain sum, by the transport where it has one."""
        comm, summed = self._exchange.comm, self._sending.summed
        self.began = comm.clock()
        total = comm.native_allreduce(cast(Tensor, summed), facts=self._facts)
        if total is None:
            self._work = self._started()
            return self._work.wait()
        self.bytes_sent = 2 * total.nbytes * (comm.size - 1) // comm.size  # of the best dense allreduces
        outcome: Checked = total, None
        if self._exchange.nonfinite == "raise" and not bool(all_finite(total)):
            facts = f"what is not finite in {self._sending.facts}"
            outcome = run(self._checked(_done(total)), comm, facts=facts, device=self._lane.bucket.device)
        self.ended = comm.clock()
        return outcome

    def _checked(self, schedule: Schedule[Any]) -> Schedule[Checked]:
        """The schedule's result and, in the same call, the error that names who gave what is not finite in it.

        Where only what this rank is to keep is not finite, the algorithm has hidden it from the others: then the call
        fails, which all of them learn.
        """
        result = yield from schedule
        if self._exchange.nonfinite != "raise":
            return result, None
        exchange, (total, dropped) = self._exchange, self._lane.values(result)
        if not bool(all_finite(total)):
            found = self._sending.suspect()
            told = culprit(found, self._lane.bucket, exchange.names, exchange.comm, what=exchange.what)
            return result, (yield from told)
        if not bool(all_finite(dropped)):
            raise unlawful(self._facts, exchange.comm.rank)
        return result, None


def _done(result: Any) -> Schedule[Any]:
    """A schedule that has its result already."""
    yield from ()
    return result


class Means:
    """Cuts tensors into buckets, starts their exchange, together or bucket by bucket, and waits for all of them.

    stands: whether the step that was exchanged last does; where not, it left no trace in the exchange.
    """

    def __init__(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        self._exchange, self._buckets = exchange, buckets
        self._numel = sum(bucket.numel for bucket in buckets)
        self._flats = [empty_like(bucket) for bucket in buckets]
        self._works: dict[int, Work[Tensor]] = {}
        self.stands = True
        for bucket in buckets:
            exchange.open(bucket)

    def members(self, position: int) -> Sequence[int]:
        """Members of a bucket."""
        return self._buckets[position].members

    def start(self, tensors: Mapping[int, Tensor | None], *, clips: bool) -> None:
        """Starts all buckets, of tensors by member; gathers all, and clips if asked to, before anything is sent."""
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            bucket.gather(tensors, out=flat)
        if clips:
            self._exchange.clip(self._flats)
        for position, (bucket, flat) in enumerate(zip(self._buckets, self._flats, strict=True)):
            self._works[position] = self._exchange.start(bucket, flat)

    def start_one(self, position: int, tensors: Mapping[int, Tensor | None]) -> None:
        """Starts one bucket before the others' tensors exist: it is clipped by itself."""
        bucket = self._buckets[position]
        flat = bucket.gather(tensors, out=self._flats[position])
        self._exchange.clip([flat], of=self._numel)
        self._works[position] = self._exchange.start(bucket, flat)

    def after(self, start: Callable[[], None]) -> list[Tensor]:
        """Calls `start`, which starts the remaining buckets, and ends the step; returns the means by bucket."""
        try:
            start()
            means = self._finish()
            self.stands = self._exchange.commit_or_rollback()
        except Exception:
            self._exchange.undo()
            raise
        return means

    def put(self, means: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Writes the means into tensors by member."""
        for mean, bucket in zip(means, self._buckets, strict=True):
            bucket.scatter(mean, tensors)

    def _finish(self) -> list[Tensor]:
        """The means of all buckets; the first error once all of them are over, so that none is under way after it."""
        self._exchange.begin_waiting()
        works, self._works = self._works, {}
        means, errors = [], []
        for position in sorted(works):
            try:
                means.append(works[position].wait())
            except CollectiveError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return means
