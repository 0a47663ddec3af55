"""Tiny tensors whole, beside the selection from the others: biases, norms, and what else is small and matters.

A bias competes for the k of a model with matrices a hundred times its size, and waits as long as their entries do. All
of it costs next to nothing in a large model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from communicators import Bucket, Communicator, Schedule, schedules
from torch import Tensor

from data_parallel.exchange import Transfer
from data_parallel.nonfinite import first_nonfinite
from data_parallel.schemes.residuals import in_units, laid_out
from data_parallel.schemes.selections import Selections


class TinyWhole:
    """Scheme that sums a bucket's members of fewer than `below` elements dense, in the same call as the selection.

    The selection sees zeros in their place, so they have no residuals, and take nothing of its k. momentum: theirs is
    plain, u ← m·u + g, send u; nothing is cleared, because nothing waits. Only the selection uses the wire.
    """

    def __init__(self, selections: Selections, comm: Communicator, *, below: int, momentum: float) -> None:
        self._selections, self._comm = selections, comm
        self._below, self._momentum = below, momentum
        self.keeps = selections.keeps
        self._tiny: dict[str, Tensor] = {}  # by bucket: which elements
        self._velocities: dict[str, Tensor] = {}
        self._open: dict[str, Tensor] = {}  # as this step leaves them

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket, with its small members apart."""
        spans = [(low, high) for low, high in laid_out(bucket) if high - low < self._below] or [(0, 0)]
        self._tiny[key] = tiny = torch.cat([torch.arange(low, high, device=bucket.device) for low, high in spans])
        if "velocities" in kept:
            self._velocities[key] = kept["velocities"][tiny]
            kept["velocities"][tiny] = 0
        self._selections.register(key, bucket, kept)

    def forget(self, key: str) -> dict[str, Tensor]:
        """Forgets the bucket, and returns its memories."""
        kept, tiny = self._selections.forget(key), self._tiny.pop(key)
        before, after = self._velocities.pop(key, None), self._open.pop(key, None)
        velocity = before if after is None else after
        if velocity is not None:
            kept["velocities"][tiny] = velocity
        return kept

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """Takes small members out of the gradient, and selects from the others."""
        tiny = self._tiny[key]
        if not len(tiny):
            return self._selections.transfer(key, flat, scale, unused)
        whole = in_units(flat[tiny], scale)
        velocities: dict[str, Tensor] = {}
        if self._momentum:
            whole, velocities[key] = self._with_momentum(key, whole, unused)
        flat[tiny] = 0
        selected = self._selections.transfer(key, flat, scale, unused)
        keep = partial(self._open.update, velocities)
        return _Both(selected, whole, tiny, self._comm.rank, self._comm.size, scale, keep)

    def commit(self) -> None:
        """Keeps this step's memories."""
        self._selections.commit()
        self._velocities.update(self._open)
        self._open.clear()

    def rollback(self) -> None:
        """Restores the memories from before the step."""
        self._selections.rollback()
        self._open.clear()

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Residuals and velocities by bucket, small members included."""
        kept = self._selections.kept()
        for key, velocity in {**self._velocities, **self._open}.items():
            together = kept["velocities"][key].clone()
            together[self._tiny[key]] = velocity
            kept["velocities"] = {**kept["velocities"], key: together}
        return kept

    def residuals_now(self) -> list[Tensor]:
        """Current residuals: references."""
        return self._selections.residuals_now()

    def state_dict(self) -> dict[str, Any]:
        """State of the selection."""
        return self._selections.state_dict()

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets, and resets the selection."""
        self._selections.reset(state)
        self._tiny, self._velocities, self._open = {}, {}, {}

    def _with_momentum(self, key: str, gradient: Tensor, unused: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """The velocity to be sent, of what is unused nothing, and the one to be kept, where that waits."""
        before = self._open.get(key, self._velocities.get(key))
        if before is None:
            before = torch.zeros_like(gradient)
        tiny, idle = self._tiny[key], torch.zeros_like(gradient, dtype=torch.bool)
        for span in unused:
            idle |= (tiny >= span.start) & (tiny < span.stop)
        velocity = torch.where(idle, before, self._momentum * before + gradient)
        return velocity.masked_fill(idle, 0), velocity


@dataclass(frozen=True, eq=False)
class _Both:
    """Transfer of a selection and small members. Its schedule returns the selection's result, and their dense sum."""

    selected: Transfer
    whole: Tensor
    tiny: Tensor
    rank: int
    size: int
    scale: float
    keep: Callable[[], None]  # what is tiny has been summed: its velocity
    summed: None = None

    @property
    def facts(self) -> str:
        return f"{self.selected.facts} and {len(self.whole)} elements whole"

    @property
    def schedule(self) -> Schedule[tuple[Any, Tensor]]:
        total = yield from schedules.allreduce(self.whole, self.rank, self.size)
        return (yield from self.selected.schedule), total

    def agreed(self, result: tuple[Any, Tensor]) -> Tensor:
        return torch.cat([self.selected.agreed(result[0]).view(-1), result[1]])

    def own(self, result: tuple[Any, Tensor]) -> Tensor:
        return self.selected.own(result[0])

    def suspect(self) -> int:
        position = first_nonfinite(self.whole)
        found = [self.selected.suspect(), int(self.tiny[position]) if position >= 0 else -1]
        return min((element for element in found if element >= 0), default=-1)

    def end(self, result: tuple[Any, Tensor], flat: Tensor) -> tuple[Tensor, Tensor]:
        mean, seen = self.selected.end(result[0], flat)
        self.keep()
        whole = (result[1] / self.size * self.scale).to(flat.dtype)
        mean[self.tiny] += whole  # what waited of them before they were sent whole may have been selected
        return mean, torch.cat([seen, whole])
