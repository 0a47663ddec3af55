"""The mean over the ranks of one tensor a parameter: of gradients, or of what an optimizer would add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from communicators import Bucket, CollectiveError, Work
from replicas.by_parameter import empty_like
from torch import Tensor

from data_parallel.exchange import Exchange


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
            exchange.register(bucket)

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
