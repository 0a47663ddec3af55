"""Exchange of this rank's gradients for their mean over all ranks, bucket by bucket: dense in, dense out.

An `Exchange` has a lane for each bucket, and ends steps: a lane decides how its gradient travels, and owns what is kept
of it between steps. `Means` takes all tensors of a model through an exchange.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from communicators import Bucket, CollectiveError, Communicator, Schedule, Work, run, start, tracing
from sparse_compress import all_finite
from torch import Tensor

from data_parallel.clipping import clip_limit, clip_together
from data_parallel.lanes import ERROR_STATE, Lane, Saved, Scheme, Sending, State, empty_like
from data_parallel.nonfinite import culprit, refuse_nonfinite, unlawful
from data_parallel.settings import Settings
from data_parallel.tally import Tally

Checked = tuple[Any, CollectiveError | None]
"""A schedule's result, and the error that every rank is to raise where it is not finite."""


class Exchange:
    """Means of buckets, and the steps that they make up.

    names: names of the parameters, which buckets refer to by position; the list may grow.
    settings: of them nonfinite and clip_norm. nonfinite="raise": a NaN or inf of any rank is an error on all of them,
        raised by each mean's wait. "skip": `commit_or_rollback` tells whether the step stands, and otherwise undoes it.
        clip_norm: target norm of the mean, which `clip` approaches by clipping ranks' own gradients.
    owner: the owner's name in messages.
    native: dense sums are left to the transport, if it has its own, when their mean is waited for.
    withholds: residuals wait of members whose gradient is all zeros.
    what: name in messages of the exchanged tensors.
    cut: a fact, as text: how parameters were cut into buckets, if ranks could differ in that.
    shared: another fact, about this step: values that ranks must share.
    loaded: another: whether a state was loaded, because residuals that only some ranks have loaded are lost on others.
    unclaimed: error state of no lane, by kind and parameter: that was loaded, or whose bucket has been cut anew.
    selection_seconds: seconds so far on this rank, by the communicator's clock.
    """

    def __init__(
        self,
        scheme: Scheme,
        comm: Communicator,
        names: Sequence[str],
        settings: Settings,
        *,
        owner: str,
        native: bool = False,
        withholds: bool = False,
        what: str = "gradient",
    ) -> None:
        self.scheme, self.comm, self.names, self.what = scheme, comm, names, what
        self.nonfinite, self.native, self._clip_norm = settings.nonfinite, native, settings.clip_norm
        self._owner = owner if self._clip_norm is None else f"{owner} with clip_norm={self._clip_norm}"
        self._withholds = withholds and bool(scheme.keeps)
        self.cut = self.shared = self.loaded = ""
        self._lanes: dict[int, Lane] = {}  # by first member
        self._open: list[Lane] = []  # those of this step, as they were first used in it
        self.unclaimed: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}
        self._states: dict[str, State] = {}  # of the algorithm, loaded, of no lane yet
        self.totals_finite: list[Tensor] = []  # of this step, by bucket, 0-D bool: a GPU is asked once, at its end
        self.dropped_finite: list[Tensor] = []
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

    def start(self, bucket: Bucket, flat: Tensor, *, scale: float = 1.0, of: int | None = None) -> Mean:
        """Starts one bucket: `flat`, 1-D, belongs to the exchange until its mean has been waited for.

        scale: loss scale; residuals are stored without it. of: elements of the whole model, to clip this bucket by its
        share of them; None: it is not clipped here.
        """
        lane = self.open(bucket)
        if lane not in self._open:
            self._open.append(lane)
        if of is not None:
            self.clip([flat], scale=scale, of=of)
        unused = unused_spans(lane.spans, flat) if self._withholds else ()
        began = self.comm.clock()
        with tracing.labelled("select"):
            sending = lane.send(flat, scale, unused)
        self.selection_seconds += self.comm.clock() - began
        mean = Mean(self, lane, sending, f"{sending.facts} in {self._owner}{self.shared}{self.loaded}{self.cut}")
        if not self.native or sending.summed is None:
            mean.start()
        self.tally.add(mean.work or mean, dense=2 * flat.nbytes * (self.comm.size - 1) // self.comm.size)
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
                self.unclaimed[kind].update(found)
            del self._lanes[old.bucket.members[0]]
            self._open = [lane for lane in self._open if lane is not old]
        key = self.names[first]
        self._lanes[first] = self.scheme.open(bucket, Saved(key, self._taken(bucket), self._states.pop(key, None)))
        return self._lanes[first]

    def commit_or_rollback(self) -> bool:
        """Ends the step, in the same way on every rank; returns False if it was undone because a mean is not finite."""
        if self.totals_finite and not bool(torch.stack(self.totals_finite).all()):
            self.undo()
            return False
        dropped, self.totals_finite, self.dropped_finite = self.dropped_finite, [], []
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
        if self.nonfinite == "skip" or self.comm.elastic:
            for lane in reversed(self._open):  # lanes share a compressor's state, which the first saw before the step
                lane.rollback()
        self._open, self.totals_finite, self.dropped_finite = [], [], []

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
        return {**self.error_state(), "algorithm_state": list(states.items()), **self.scheme.state_dict()}

    def error_state(self) -> dict[str, dict[str, Tensor]]:
        """Error state by kind and parameter: references."""
        found = self._by_parameter(self._lanes.values())
        return {kind: {**self.unclaimed[kind], **found[kind]} for kind in ERROR_STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything by copies of a state, but for another algorithm's own. ValueError before any change."""
        if state["algorithm"] != self.scheme.name:
            state = {**state, "algorithm_state": []}
        refuse_nonfinite({kind: state[kind] for kind in ERROR_STATE})
        error_state = {kind: {name: tensor.clone() for name, tensor in state[kind].items()} for kind in ERROR_STATE}
        states = copy.deepcopy(dict(state["algorithm_state"]))
        self.scheme.load_state_dict(state)
        self.unclaimed, self._states, lanes = error_state, states, list(self._lanes.values())
        self._lanes, self._open, self.totals_finite, self.dropped_finite = {}, [], [], []
        self.loaded = f" with a state of {state['steps']} steps loaded" if "steps" in state else " with a state loaded"
        for lane in lanes:
            self.open(lane.bucket)

    def stats(self) -> dict[str, float]:
        """Total costs so far, by the names of `communicators.stats.Stats`."""
        left = self.scheme.dense_steps_left
        residuals = [lane.residual for lane in self._lanes.values() if lane.residual is not None]
        squares = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in residuals]
        return {
            **self.tally.numbers(),
            **({} if left is None else {"dense_steps_left": left}),
            "seconds_selecting": self.selection_seconds,
            "residual_norm": math.sqrt(sum(squares)),
        }

    def _by_parameter(self, lanes: Iterable[Lane]) -> dict[str, dict[str, Tensor]]:
        """Error state of lanes, by parameter: views."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}
        for lane in lanes:
            for kind, flat in lane.error_state().items():
                for member, view in zip(lane.bucket.members, lane.bucket.views(flat), strict=True):
                    found[kind][self.names[member]] = view
        return found

    def _taken(self, bucket: Bucket) -> dict[str, Tensor]:
        """The members' unclaimed residuals and velocities, each as one flat tensor, zeros where there is none."""
        kept = {}
        for kind in self.scheme.keeps:
            found: dict[int, Tensor | None] = {}
            for member, shape in zip(bucket.members, bucket.shapes, strict=True):
                tensor = found[member] = self.unclaimed[kind].pop(self.names[member], None)
                if tensor is not None and tensor.shape != shape:
                    raise ValueError(
                        f"{kind} of {self.names[member]!r}: {tuple(tensor.shape)}, expected {tuple(shape)}"
                    )
            if any(tensor is not None for tensor in found.values()):
                kept[kind] = bucket.gather(found, out=empty_like(bucket))
        return kept


@dataclass(eq=False)
class Mean:
    """A bucket's mean on its way; what was dropped goes back to its lane once, at the first request.

    work: the call that carries it; None: the transport's own sum does, once it is waited for. began, ended, bytes_sent:
    of that sum, as a `Work` has them. lost: error of the start, where a rank of an elastic group had died by then.
    """

    exchange: Exchange
    lane: Lane
    sending: Sending
    facts: str
    work: Work[Checked] | None = None
    began: float = math.inf
    ended: float | None = None
    bytes_sent: int = 0
    mean: Tensor | None = None
    lost: CollectiveError | None = None

    def start(self) -> None:
        """Starts the call. An elastic group's failure is an error of `wait`: backward, which starts it, goes on."""
        comm, checked = self.exchange.comm, self.checked(self.sending.schedule)
        try:
            self.work = start(checked, comm, facts=self.facts, device=self.lane.bucket.device)
        except CollectiveError as error:
            if not comm.elastic:
                raise
            self.lost = error

    def wait(self) -> Tensor:
        """The mean. Raises the CollectiveError of the call, or of what is not finite."""
        if self.lost is not None:
            raise self.lost
        if self.mean is None:
            exchange = self.exchange
            result, error = self._summed() if self.work is None else self.work.wait()
            if error is not None:
                raise error
            with tracing.labelled("restore"):
                self.mean, seen = self.lane.receive(self.sending, result)
            if exchange.nonfinite == "skip":
                exchange.totals_finite.append(all_finite(seen))
                exchange.dropped_finite.append(all_finite(self.lane.values(result)[1]))
        return self.mean

    def checked(self, schedule: Schedule[Any]) -> Schedule[Checked]:
        """The schedule's result and, in the same call, the error that names who gave what is not finite in it.

        Where only what this rank keeps is not finite, the algorithm has hidden that: then all ranks' calls fail.
        """
        result = yield from schedule
        exchange, sending, bucket = self.exchange, self.sending, self.lane.bucket
        if exchange.nonfinite != "raise":
            return result, None
        total, dropped = self.lane.values(result)
        if not bool(all_finite(total)):
            return result, (yield from culprit(sending.suspect(), bucket, exchange.names, exchange.comm, exchange.what))
        if not bool(all_finite(dropped)):
            raise unlawful(self.facts, exchange.comm.rank)
        return result, None

    def _summed(self) -> Checked:
        """The plain sum, by the transport where it has one."""
        comm, device = self.exchange.comm, self.lane.bucket.device
        self.began = comm.clock()
        total = comm.native_allreduce(cast(Tensor, self.sending.summed), facts=self.facts)
        outcome: Checked = total, None
        if total is None:
            work = start(self.checked(self.sending.schedule), comm, facts=self.facts, device=device)
            outcome, self.bytes_sent = work.wait(), work.bytes_sent
        else:
            self.bytes_sent = 2 * total.nbytes * (comm.size - 1) // comm.size  # of the best dense allreduces
            if self.exchange.nonfinite == "raise" and not bool(all_finite(total)):
                outcome = run(self.checked(_done(total)), comm, facts=f"not finite: {self.facts}", device=device)
        self.ended = comm.clock()
        return outcome


def _done(result: Any) -> Schedule[Any]:
    """A schedule that has its result already."""
    yield from ()
    return result


def wait_for_all(means: Iterable[Mean]) -> list[Tensor]:
    """All means; raises the first error once all of them are over, so that none is under way after it."""
    found, errors = [], []
    for mean in means:
        try:
            found.append(mean.wait())
        except CollectiveError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def unused_spans(spans: Sequence[slice], flat: Tensor) -> list[slice]:
    """Spans of members that are all zeros. For most others the first elements show that they are not."""
    if not flat.is_cpu:  # one look for all of them, because each waits for the device
        used = torch.stack([flat[span].any() for span in spans]).tolist()
        return [span for span, any_used in zip(spans, used, strict=True) if not any_used]
    return [span for span in spans if not flat[span][:64].any() and not flat[span].any()]


class Means:
    """Cuts tensors into buckets, starts their exchange, together or bucket by bucket, and waits for all of them.

    stands: whether the step that was exchanged last does; where not, it left no trace in the exchange.
    """

    def __init__(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        self.buckets, self.stands = buckets, True
        self._exchange, self._numel = exchange, sum(bucket.numel for bucket in buckets)
        self._flats = [empty_like(bucket) for bucket in buckets]
        self._started: dict[int, Mean] = {}
        for bucket in buckets:
            exchange.open(bucket)

    def start(self, tensors: Mapping[int, Tensor | None], positions: Iterable[int], *, clips: bool) -> None:
        """Starts buckets, of tensors by member; gathers, and clips if asked to, before anything of them is sent."""
        parts = {position: self.buckets[position].gather(tensors, out=self._flats[position]) for position in positions}
        if clips:
            self._exchange.clip(list(parts.values()), of=self._numel)
        for position, flat in parts.items():
            self._started[position] = self._exchange.start(self.buckets[position], flat)

    def after(self, start: Callable[[], None], undo: Callable[[], object] = lambda: None) -> list[Tensor]:
        """Calls `start`, which starts the remaining buckets, and ends the step; returns the means by bucket.

        Where a rank of an elastic group dies, lanes are rolled back, and `start` is called again: it starts all buckets
        then. undo: takes back what else `start` has changed.
        """

        def exchanged() -> list[Tensor]:
            start()
            self._exchange.tally.waiting_since = self._exchange.comm.clock()
            started, self._started = self._started, {}
            return wait_for_all(started[position] for position in sorted(started))

        def take_back() -> None:
            self._exchange.undo()
            undo()

        try:
            means = self._exchange.comm.atomic(exchanged, take_back)
            self.stands = self._exchange.commit_or_rollback()
        except Exception:
            self._exchange.undo()
            raise
        return means

    def put(self, means: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Writes the means into tensors by member."""
        for mean, bucket in zip(means, self.buckets, strict=True):
            bucket.scatter(mean, tensors)
