"""All tensors of a model taken through an exchange, bucket by bucket."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from communicators import Bucket
from torch import Tensor

from data_parallel.exchange import Exchange, Mean, wait_for_all
from data_parallel.lanes import empty_like


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

    def after(
        self, start: Callable[[], None], undo: Callable[[], object] = lambda: None, beside: Sequence[Any] = ()
    ) -> list[Tensor]:
        """Calls `start`, which starts the remaining buckets, and ends the step; returns the means by bucket.

        Where a rank of an elastic group dies, lanes are rolled back, and `start` is called again: it starts all buckets
        then. undo: takes back what else `start` has changed. beside: each has a `wait()`, called after the means'.
        """

        def exchanged() -> list[Tensor]:
            start()
            self._exchange.tally.waiting_since = self._exchange.comm.clock()
            started, self._started = self._started, {}
            found = wait_for_all([*(started[position] for position in sorted(started)), *beside])
            return found[: len(started)]

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
