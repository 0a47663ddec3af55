"""Residuals of whole buckets, for schemes that send something of every element; a step changes them when it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from communicators import Bucket
from torch import Tensor

from data_parallel.memories import MEMORIES


class Residuals:
    """Residuals by bucket, flat, in float32 (float64 for such gradients); new ones stand beside them until a step ends.

    Memory: 4 bytes a parameter, and as much again between an exchange and the step's end.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._open: dict[str, Tensor] = {}

    def register(self, key: str, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket with the memories of its parameters.

        Args:
            key: Its name.
            kept: Memories by name, flat; {} if there are none.
        """
        if kept:
            self._kept[key] = kept["residuals"]

    def forget(self, key: str) -> dict[str, Tensor]:
        """Forgets a bucket, and returns its memories. A step that may still be undone must have ended."""
        before, after = self._kept.pop(key, None), self._open.pop(key, None)
        latest = before if after is None else after
        return {} if latest is None else {"residuals": latest}

    def accumulated(self, key: str, gradient: Tensor, unused: Sequence[slice]) -> Tensor:
        """Residual + gradient, in memory of its own.

        Args:
            key: The bucket's name.
            gradient: Flat.
            unused: Spans that are zeros in the result; their residuals wait.
        """
        before = self._before(key)
        if before is None:
            return gradient.clone()
        total = before + gradient
        for span in unused:
            total[span] = 0
        return total

    def put(self, key: str, rest: Tensor, unused: Sequence[slice]) -> None:
        """Stores the part of the accumulated gradient that was not sent.

        Args:
            key: The bucket's name.
            rest: That part, flat; this object owns it from now on.
            unused: As in `accumulated`.
        """
        if (before := self._before(key)) is not None:
            for span in unused:
                rest[span] += before[span]
        self._open[key] = rest

    def commit(self) -> None:
        """Keeps this step's residuals."""
        self._kept.update(self._open)
        self._open.clear()

    def rollback(self) -> None:
        """Restores the residuals from before the step, bit for bit."""
        self._open.clear()

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Memories by name and bucket: references."""
        return {**{memory: {} for memory in MEMORIES}, "residuals": self._kept}

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets.

        Args:
            state: What is loaded.

        Raises:
            ValueError: It has velocities that are not zero, which would be lost here.
        """
        if any(bool(velocity.any()) for velocity in state["velocities"].values()):
            raise ValueError(
                "the state holds momenta of before a selection, but nothing is selected here: load the one that it was "
                "saved with, or drop them with reshard_residuals(states, size, drop=True)"
            )
        self._kept, self._open = {}, {}

    def _before(self, key: str) -> Tensor | None:
        return self._open.get(key, self._kept.get(key))


def in_units(flat: Tensor, scale: float) -> Tensor:
    """Gradient divided by its loss scale, in float32 (float64 stays)."""
    gradient = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return gradient if scale == 1.0 else gradient / scale


def laid_out(bucket: Bucket) -> list[tuple[int, int]]:
    """[low, high) of each member in the flat tensor."""
    edges = [0]
    for shape in bucket.shapes:
        edges.append(edges[-1] + shape.numel())
    return list(pairwise(edges))
