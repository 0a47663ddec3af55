"""DDP's first backwards after a checkpoint: the buckets are those that it was saved with, not yet DDP's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from communicators import Bucket, CollectiveError, Work
from torch import Tensor

BACKWARDS = 2
"""After so many DDP has cut a module's buckets anew: after one, with static_graph after two."""


class Resumed:
    """Collects DDP's buckets, and exchanges them in the checkpoint's layout once the last has come.

    What is selected, and who keeps what is cut, goes by bucket. A new DDP module begins with other buckets than those
    that it cuts when it has seen in which order gradients come; so a run that goes on from a checkpoint would have
    other bits than one that never stopped. These few backwards overlap with nothing, and copy the gradients.

    layout: the names in each bucket, in the order in which DDP brought them last. Parameters other than those: the
    buckets stay as DDP has them.
    """

    def __init__(self, layout: Sequence[Sequence[str]]) -> None:
        self.layout = [list(names) for names in layout]
        self._backwards = 0
        self._brought: list[tuple[Bucket, Tensor]] = []
        self._gates: list[torch.futures.Future[CollectiveError | None]] = []

    def begin(self) -> bool:
        """Begins a backward; returns whether it is still one of the first."""
        self._brought, self._gates = [], []
        self._backwards += 1
        return self._backwards <= BACKWARDS

    def hold(
        self, bucket: Bucket, flat: Tensor
    ) -> tuple[torch.futures.Future[CollectiveError | None], Callable[[], Tensor]]:
        """Holds a bucket until `release` puts the mean into `flat`; returns that future, and a getter of `flat`."""
        devices: list[int | str | torch.device] = [bucket.device] if bucket.device.type == "cuda" else []
        gate: torch.futures.Future[CollectiveError | None] = torch.futures.Future(devices=devices)
        self._brought.append((bucket, flat))
        self._gates.append(gate)
        return gate, lambda: _raised(gate.wait(), flat)

    def release(self, names: Sequence[str], start: Callable[[Bucket, Tensor], Work[Tensor]]) -> list[Bucket]:
        """Exchanges all buckets once the last has come, waits for them, and returns how they were cut.

        names: names of the members. All ranks hold the same buckets, so they start in the same order.
        """
        brought = [bucket for bucket, _ in self._brought]
        there: dict[int, Tensor] = {}
        for bucket, flat in self._brought:
            there.update(zip(bucket.members, bucket.views(flat), strict=True))
        buckets = _cut(self.layout, names, brought) or brought
        works = [(bucket, start(bucket, bucket.gather(there))) for bucket in buckets]
        error: CollectiveError | None = None
        for bucket, work in works:
            try:
                mean = work.wait()
            except CollectiveError as failure:
                error = error or failure
                continue
            for member, view in zip(bucket.members, bucket.views(mean), strict=True):
                there[member].copy_(view)
        if buckets == brought:
            self._backwards = BACKWARDS  # DDP's are those already, or will never be
        for gate in self._gates:
            gate.set_result(error)
        return buckets


def check_layout(layout: Any) -> list[list[str]]:
    """Checks the bucket layout of a checkpoint; ValueError if it is none."""
    if not isinstance(layout, list) or not all(
        isinstance(names, list) and names and all(isinstance(name, str) for name in names) for names in layout
    ):
        raise ValueError(f"the state's buckets are {layout!r}, expected lists of the parameters' names: it was damaged")
    return layout


def _cut(layout: Sequence[Sequence[str]], names: Sequence[str], brought: Sequence[Bucket]) -> list[Bucket]:
    """The same tensors in the layout's buckets; none where it is of others."""
    found: dict[str, tuple[Bucket, int]] = {names[m]: (b, at) for b in brought for at, m in enumerate(b.members)}
    if sorted(name for names in layout for name in names) != sorted(found):
        return []
    buckets = []
    for inside in layout:
        members = [found[name] for name in inside]
        kinds = {(bucket.dtype, bucket.device) for bucket, _ in members}
        if len(kinds) > 1:
            return []
        buckets.append(
            Bucket(
                tuple(bucket.members[at] for bucket, at in members),
                tuple(bucket.shapes[at] for bucket, at in members),
                *kinds.pop(),
                tuple(bucket.strides[at] for bucket, at in members),
            )
        )
    return buckets


def _raised(error: CollectiveError | None, flat: Tensor) -> Tensor:
    if error is not None:
        raise error
    return flat
