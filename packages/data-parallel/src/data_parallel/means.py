"""Means of buckets on their way: one bucket's, and all tensors of a model taken through an exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from communicators import Bucket, CollectiveError, Schedule, Work, run, start, tracing
from sparse_compress import all_finite
from torch import Tensor

from data_parallel.lanes import Lane, Sending, empty_like
from data_parallel.nonfinite import culprit, unlawful

if TYPE_CHECKING:
    from data_parallel.exchange import Exchange

Checked = tuple[Any, CollectiveError | None]
"""A schedule's result, and the error that every rank is to raise where it is not finite."""


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
            if exchange.settings.nonfinite == "skip":
                exchange.flags.append((all_finite(seen), all_finite(self.lane.values(result)[1])))
        return self.mean

    def checked(self, schedule: Schedule[Any]) -> Schedule[Checked]:
        """The schedule's result and, in the same call, the error that names who gave what is not finite in it.

        Where only what this rank keeps is not finite, the algorithm has hidden that: then all ranks' calls fail.
        """
        result = yield from schedule
        exchange, sending, bucket = self.exchange, self.sending, self.lane.bucket
        if exchange.settings.nonfinite != "raise":
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
            if self.exchange.settings.nonfinite == "raise" and not bool(all_finite(total)):
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
