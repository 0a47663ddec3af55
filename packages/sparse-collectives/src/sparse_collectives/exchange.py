"""From the gradients of this rank to their mean over all ranks, bucket by bucket.

Two ways: whole gradients by a dense allreduce, or what a compressor selects of them by a sparse one, with error
feedback. `start` takes a bucket's gradients, `finish` gives the means of all that were started.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from communicators import Bucket, Communicator, Work, allreduce, allreduce_async
from sparse_compress import Compressor, ErrorFeedback, SparseVector
from torch import Tensor

from sparse_collectives.algorithms import algorithm_named
from sparse_collectives.allreduce import sparse_allreduce_async
from sparse_collectives.checkpoint import refuse_residuals
from sparse_collectives.dense_wire import dense_wire
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State
from sparse_collectives.suspects import first_nonfinite, marked, suspect_element
from sparse_collectives.wire import wire_named

Gradients = Mapping[int, Tensor | None]  # by their position among the trained parameters


@dataclass(frozen=True)
class Mean:
    """flat: a bucket's, 1-D, the same bits on every rank, and valid until that bucket is started again.

    finite: whether all of it is. suspect: where not, the first element (in the bucket) of what this rank gave that is
    not finite, -1 if all of it was.
    """

    flat: Tensor
    finite: bool
    suspect: int = -1


class Exchange(Protocol):
    """What the optimizer needs. One step: start each bucket, finish, then commit or rollback."""

    def start(self, position: int, gradients: Gradients) -> None:
        """Takes the gradients of the members of bucket number `position`; None counts as zeros."""

    def finish(self) -> list[Mean]:
        """Waits; the means of all buckets, in their order. Raises CollectiveError."""

    def commit(self) -> None:
        """The step stands."""

    def rollback(self) -> None:
        """As if a tentative step had not been: residuals and algorithm states are what they were, bit for bit."""

    def state_dict(self) -> dict[str, Any]:
        """Residuals, velocities and algorithm states of this rank, by bucket name; references."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces them by copies. Raises ValueError, before anything is changed, for what does not fit."""


class DenseExchange:
    """Sums whole gradients; keeps nothing between steps. Half-precision gradients are summed in float32.

    wire: "bf16" or "fp16": gradients are divided by P, rounded, and summed in that; what is rounded off is lost.
    background: each sum goes on by itself from its start, by our schedule; else all are done in `finish`, by the
    transport's own allreduce where it has one.
    """

    def __init__(
        self, buckets: Sequence[Bucket], comm: Communicator, *, wire: str = "fp32", background: bool = False
    ) -> None:
        self._comm, self._background = comm, background
        self._wire = dense_wire(wire)
        self._works: dict[int, Work[Tensor]] = {}
        self._buckets = buckets
        self._flats = [_flat(bucket) for bucket in buckets]

    def start(self, position: int, gradients: Gradients) -> None:
        """See `Exchange.start`."""
        flat = self._buckets[position].gather(gradients, out=self._flats[position])
        if self._background:
            self._works[position] = allreduce_async(self._wire.given(flat, self._comm.size), self._comm)

    def finish(self) -> list[Mean]:
        """See `Exchange.finish`."""
        works, self._works = self._works, {}
        return [self._mean(flat, works.get(position)) for position, flat in enumerate(self._flats)]

    def commit(self) -> None:
        """Nothing to do."""

    def rollback(self) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {"residuals": {}, "velocities": {}, "algorithm": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do; ValueError for residuals that are not zero, which would be lost here."""
        refuse_residuals(state["residuals"])

    def _mean(self, flat: Tensor, work: Work[Tensor] | None) -> Mean:
        size = self._comm.size
        total = allreduce(self._wire.given(flat, size), self._comm) if work is None else work.wait()
        mean = self._wire.mean(total, size, flat.dtype)
        finite = _is_finite(mean)
        return Mean(mean, finite, -1 if finite else first_nonfinite(flat))


class SparseExchange:
    """Sums selections; what is not sent, and what the algorithm drops, waits in the residuals.

    The algorithm's own selection takes the compressor's place where it has one; the compressor then only says k.
    wire: how selections travel, a name in `WIRES`. tentative: residuals and states can be rolled back, for twice the
    memory. Raises TypeError for float64 gradients on a wire of fewer bytes.
    """

    def __init__(
        self,
        buckets: Mapping[str, Bucket],
        comm: Communicator,
        *,
        compressor: Compressor,
        algorithm: str,
        options: Mapping[str, Any],
        wire: str = "fp32",
        momentum: float,
        tentative: bool,
    ) -> None:
        self._comm, self._compressor, self._algorithm, self._wire = comm, compressor, algorithm, wire
        self._entry = algorithm_named(algorithm, options, size=comm.size)
        for bucket in buckets.values():
            wire_named(wire, dtype=torch.promote_types(bucket.dtype, torch.float32))
        self._names = list(buckets)
        self._buckets = list(buckets.values())
        self._flats = [_flat(bucket) for bucket in self._buckets]
        self._feedback = ErrorFeedback(compressor, momentum=momentum, tentative=tentative)
        self._tentative = tentative
        initial = self._entry.initial_state
        self._states: dict[str, State] = {} if initial is None else {name: initial() for name in self._names}
        self._before: dict[str, State] = {}
        self._flights: dict[int, tuple[SparseVector, Work[Reduction]]] = {}

    def start(self, position: int, gradients: Gradients) -> None:
        """See `Exchange.start`."""
        name, flat = self._names[position], self._flats[position]
        self._buckets[position].gather(gradients, out=flat)
        k, state = self._compressor.entries(flat.numel()), self._states.get(name)
        if self._tentative and state is not None:
            self._before[name] = copy.deepcopy(state)
        select, rank, size = self._entry.select, self._comm.rank, self._comm.size
        prescribed = None if select is None else select(flat, rank, size, k, state)
        sent = marked(self._feedback.compress(name, flat, select=prescribed), self._feedback, name)
        settings: dict[str, Any] = {"algorithm": self._algorithm, "options": self._entry.options, "wire": self._wire}
        work = sparse_allreduce_async(sent, self._comm, k=k, state=state, **settings)
        self._flights[position] = (sent, work)

    def finish(self) -> list[Mean]:
        """See `Exchange.finish`."""
        flights, self._flights = self._flights, {}
        return [self._mean(position, *flights[position]) for position in sorted(flights)]

    def commit(self) -> None:
        """See `Exchange.commit`."""
        self._feedback.commit()
        self._before.clear()

    def rollback(self) -> None:
        """See `Exchange.rollback`."""
        if not self._tentative:
            return
        self._feedback.rollback()
        self._states.update(self._before)
        self._before.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Exchange.state_dict`."""
        return {**self._feedback.state_dict(), "algorithm": self._states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Exchange.load_state_dict`."""
        self._feedback.load_state_dict({part: state[part] for part in state if part != "algorithm"})
        self._states.update(copy.deepcopy(dict(state["algorithm"])))

    def _mean(self, position: int, sent: SparseVector, work: Work[Reduction]) -> Mean:
        reduction = work.wait()
        self._feedback.restore(self._names[position], reduction.dropped)
        total, mean = reduction.total, self._flats[position]
        mean.zero_().index_copy_(0, total.indices.long(), total.values / self._comm.size)
        finite = _is_finite(total.values)
        suspect = -1 if finite else suspect_element(sent, self._feedback.residual(self._names[position]))
        return Mean(mean, finite, suspect)


def _flat(bucket: Bucket) -> Tensor:
    """Where the bucket's gradients, and then their means, lie: float32, or the bucket's dtype where it is wider."""
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    return torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are: so they are if their sum is, which takes one pass; else it may have overflowed."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
