"""Small tensors summed dense, beside the selection from the others: biases, norms, and what else is small and matters.

A bias competes for the k of a model with matrices a hundred times its size, and waits as long as their entries do. All
of it costs next to nothing in a large model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from communicators import Bucket, schedules
from torch import Tensor

from data_parallel.lanes import Lane, Saved, Sending, in_units, spans_of
from data_parallel.nonfinite import first_nonfinite
from data_parallel.schemes.sparse import SparseLane, SparseScheme


class DenseSmallTensors(SparseScheme):
    """Scheme that sums members of fewer than `dense_below` elements dense, while the selection is under way.

    The selection sees zeros in their place, so they have no residuals, and take nothing of its k. Their momentum is
    plain, u ← m·u + g, send u; nothing is cleared, because nothing waits. Only the selection uses the wire.
    """

    def open(self, bucket: Bucket, saved: Saved) -> Lane:
        """Opens a bucket's lane, with a place for its small members, where it has any."""
        spans = [span for span in spans_of(bucket) if span.stop - span.start < self.dense_below]
        if not spans:
            return super().open(bucket, saved)
        small = torch.cat([torch.arange(span.start, span.stop, device=bucket.device) for span in spans])
        return _SmallLane(self, bucket, saved, small)


class _SmallLane(SparseLane):
    """A selection's lane, in which the elements `small` are summed dense, and have a velocity beside it."""

    def __init__(self, scheme: SparseScheme, bucket: Bucket, saved: Saved, small: Tensor) -> None:
        velocities, own = saved.error_state.get("velocities"), dict[str, Tensor]()
        if velocities is not None:
            own["velocities"] = velocities[small]
            velocities[small] = 0
        super().__init__(scheme, bucket, saved)
        self._small, self.kept = small, own

    def send(self, flat: Tensor, scale: float, unused: Sequence[slice]) -> Sending:
        """Takes small members out of the gradient, and selects from the others."""
        dense, self._kept_next = self._with_momentum(in_units(flat[self._small], scale), unused)
        flat[self._small] = 0
        selected = super().send(flat, scale, unused)

        def suspect() -> int:
            own = first_nonfinite(dense)
            found = [selected.suspect(), int(self._small[own]) if own >= 0 else -1]
            return min((element for element in found if element >= 0), default=-1)

        comm, facts = self._scheme.comm, f"{selected.facts} and {len(dense)} elements dense"
        total = schedules.allreduce(dense, comm.rank, comm.size)
        return replace(selected, facts=facts, beside=total, suspect=suspect)

    def values(self, result: Any) -> tuple[Tensor, Tensor]:
        """Values of the selection, or of the dense sum, of which nothing is dropped."""
        return (result, result[:0]) if isinstance(result, Tensor) else super().values(result)

    def receive(self, sending: Sending, result: Any) -> tuple[Tensor, Tensor]:
        """The mean of both."""
        mean, seen = super().receive(sending, result[0])
        self.kept |= self._kept_next
        dense = (result[1] / self._scheme.comm.size * sending.scale).to(mean.dtype)
        mean[self._small] += dense  # what waited of them before they were sent dense may have been selected
        return mean, torch.cat([seen, dense])

    def error_state(self) -> dict[str, Tensor]:
        """Residuals and velocities, small members included."""
        found = super().error_state()
        if "velocities" in self.kept:
            found["velocities"] = found["velocities"].index_copy(0, self._small, self.kept["velocities"])
        return found

    def _with_momentum(self, gradient: Tensor, unused: Sequence[slice]) -> tuple[Tensor, dict[str, Tensor]]:
        """The velocity to be sent, of what is unused nothing, and the one to be kept, where that waits."""
        momentum = self._scheme.momentum
        if not momentum:
            return gradient, {}
        before = self.kept.get("velocities", torch.zeros_like(gradient))
        idle = torch.zeros_like(gradient, dtype=torch.bool)
        for span in unused:
            idle |= (self._small >= span.start) & (self._small < span.stop)
        velocity = torch.where(idle, before, momentum * before + gradient)
        return velocity.masked_fill(idle, 0), {"velocities": velocity}
