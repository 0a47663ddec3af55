"""DDP's first backwards after a checkpoint: the buckets are those that it was saved with, not yet DDP's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from communicators import Bucket, CollectiveError
from torch import Tensor

from data_parallel.exchange import Mean, wait_for_all

BACKWARDS = 2
"""Number of backwards after which DDP has cut a module's buckets anew: one, with static_graph two."""


@dataclass
class Held:
    """A bucket of DDP that waits for the others; its mean is in `flat` once `gate` is open."""

    bucket: Bucket
    flat: Tensor
    gate: torch.futures.Future[CollectiveError | None]

    def get_future(self) -> torch.futures.Future[CollectiveError | None]:
        """A future that is over when the mean is there."""
        return self.gate

    def wait(self) -> Tensor:
        """The mean. Raises the CollectiveError of any bucket."""
        if (error := self.gate.wait()) is not None:
            raise error
        return self.flat


class SavedBucketLayout:
    """Collects DDP's buckets, and exchanges them in the checkpoint's layout once the last has come.

    What is selected, and who keeps what is cut, goes by bucket. A new DDP module begins with other buckets than those
    that it cuts when it has seen in which order gradients come; so a run that goes on from a checkpoint would have
    other bits than one that never stopped. These few backwards overlap with nothing, and copy the gradients.

    layout: the names in each bucket, in the order in which DDP brought them last. Parameters other than those: the
    buckets stay as DDP has them. Raises ValueError for an empty bucket.
    """

    def __init__(self, layout: Sequence[Sequence[str]]) -> None:
        if not all(layout):
            raise ValueError(f"of the state's buckets {layout!r} one is empty: it was damaged")
        self.layout = [list(names) for names in layout]
        self._backwards = 0
        self._held: list[Held] = []

    def begin(self) -> bool:
        """Begins a backward; returns whether it is still one of the first."""
        self._held = []
        self._backwards += 1
        return bool(self.layout) and self._backwards <= BACKWARDS

    def hold(self, bucket: Bucket, flat: Tensor) -> Held:
        """Holds a bucket until `release` puts the mean into `flat`."""
        devices: list[int | str | torch.device] = [bucket.device] if bucket.device.type == "cuda" else []
        self._held.append(Held(bucket, flat, torch.futures.Future(devices=devices)))
        return self._held[-1]

    def release(self, names: Sequence[str], start: Callable[[Bucket, Tensor], Mean]) -> None:
        """Exchanges all buckets once the last has come, and waits for them.

        names: names of the members. All ranks hold the same buckets, so they start in the same order.
        """
        brought = [held.bucket for held in self._held]
        there: Any = {}  # tensors by member
        for held in self._held:
            there.update(zip(held.bucket.members, held.bucket.views(held.flat), strict=True))
        buckets = self._cut(names, brought) or brought
        started, error = [start(bucket, bucket.gather(there)) for bucket in buckets], None
        try:
            for bucket, mean in zip(buckets, wait_for_all(started), strict=True):
                bucket.scatter(mean, there)
        except CollectiveError as failure:
            error = failure
        if buckets == brought:
            self._backwards = BACKWARDS  # DDP's are those already, or will never be
        for held in self._held:
            held.gate.set_result(error)

    def _cut(self, names: Sequence[str], brought: Sequence[Bucket]) -> list[Bucket]:
        """The same tensors in the layout's buckets; none where it is of others."""
        found: dict[str, tuple[Bucket, int]] = {names[m]: (b, at) for b in brought for at, m in enumerate(b.members)}
        if sorted(name for inside in self.layout for name in inside) != sorted(found):
            return []
        buckets = []
        for inside in self.layout:
            members = [found[name] for name in inside]
            kinds = {(bucket.dtype, bucket.device) for bucket, _ in members}
            if len(kinds) > 1:
                return []
            parts = [(b.members[at], b.shapes[at], b.strides[at]) for b, at in members]
            numbers, shapes, strides = zip(*parts, strict=True)
            buckets.append(Bucket(numbers, shapes, *kinds.pop(), strides))
        return buckets
