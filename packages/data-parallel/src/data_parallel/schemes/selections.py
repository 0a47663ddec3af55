"""The sparse exchange: selections are summed; what is not sent, or is dropped on the way, waits in the residuals."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from communicators import Bucket, Communicator, Schedule, schedules
from sparse_collectives.algorithm import Algorithm
from sparse_collectives.allreduce import scheduled
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State
from sparse_collectives.wire.wire import wire_named
from sparse_compress import Compressor, ErrorFeedback, SparseVector, StatefulCompressor, TopK
from sparse_compress.vector import put
from torch import Tensor

from data_parallel.exchange import Transfer
from data_parallel.memories import MEMORIES
from data_parallel.schemes.residuals import laid_out
from data_parallel.suspects import marked


class Selections:
    """Scheme that sends selections, with error feedback. An algorithm's own selection replaces the compressor.

    If TopK's k is all of a bucket's elements, they are summed as "dense" sums them, whatever the algorithm and wire.

    algorithm: with its options and wire. wire: the wire's name. tentative: steps can be rolled back, at the cost of
    twice the memory.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        algorithm: Algorithm,
        compressor: Compressor,
        wire: str = "fp32",
        momentum: float = 0.0,
        tentative: bool = False,
    ) -> None:
        self._comm, self._entry, self._wire = comm, algorithm, wire
        self._compressor, self._momentum, self._tentative = compressor, momentum, tentative
        self.keeps: Sequence[str] = MEMORIES if momentum else MEMORIES[:1]
        self._feedback = self._new_feedback()
        self._known: set[str] = set()  # buckets that have residuals
        self._spans: dict[str, list[slice]] = {}  # of the parameters, by bucket
        self._states: dict[str, State] = {}
        self._before: dict[str, State] = {}  # tentative: of the buckets that this step has brought
        self._facts: dict[tuple[int, torch.dtype, int, bool], str] = {}

    def register(self, key: str, bucket: Bucket, kept: Mapping[str, Tensor]) -> None:
        """Adds a bucket. TypeError for float64 gradients on a wire of fewer bytes."""
        wire_named(self._wire, dtype=torch.promote_types(bucket.dtype, torch.float32))
        if (initial := self._entry.initial_state()) is not None:
            self._states.setdefault(key, initial)
        self._spans[key] = [slice(low, high) for low, high in laid_out(bucket)]
        if kept:
            self._feedback.adopt(key, kept["residuals"], kept.get("velocities"))
            self._known.add(key)

    def forget(self, key: str) -> dict[str, Tensor]:
        """Forgets the bucket, and returns its memories."""
        self._states.pop(key, None)
        self._known.discard(key)
        self._spans.pop(key, None)
        try:
            return self._feedback.forget(key)
        except KeyError:  # nothing has been sent of it yet
            return {}

    def transfer(self, key: str, flat: Tensor, scale: float, unused: Sequence[slice]) -> Transfer:
        """Transfer of the entries selected from the accumulated gradient."""
        gradient = flat.to(torch.promote_types(flat.dtype, torch.float32)) / scale if scale != 1.0 else flat
        state, k = self._states.get(key), self._compressor.entries(gradient.numel())
        if self._tentative and state is not None:
            self._before.setdefault(key, copy.deepcopy(state))
        rank, size = self._comm.rank, self._comm.size
        prescribed = self._entry.select(gradient, rank, size, k, state) if self._entry.prescribes else None
        sent = self._feedback.compress(key, gradient, select=prescribed, withhold=unused)
        self._known.add(key)
        given, culprit = marked(sent, self._feedback, key, self._spans[key])
        whole = k >= sent.numel and isinstance(self._compressor, TopK)
        if whole:
            schedule = _summed_whole(given, rank, size)
        else:
            schedule = scheduled(given, self._comm, k, self._entry, {} if state is None else {"state": state})
        return _Selected(self._facts_of(sent, k, whole=whole), schedule, self._feedback, key, size, scale, culprit)

    def commit(self) -> None:
        """Keeps this step's memories and algorithm states."""
        self._feedback.commit()
        self._before.clear()

    def rollback(self) -> None:
        """Restores the memories and algorithm states from before the step."""
        self._feedback.rollback()
        self._states.update(self._before)
        self._before.clear()

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """Residuals and velocities by bucket: references."""
        state = self._feedback.state_dict()
        return {memory: state[memory] for memory in MEMORIES}

    def residuals_now(self) -> list[Tensor]:
        """Current residuals: references."""
        return [self._feedback.residual(key) for key in self._known]

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's state by bucket, as a list, which torch.distributed.checkpoint loads as a whole."""
        state: dict[str, Any] = {"algorithm_state": list(self._states.items())}
        if isinstance(self._compressor, StatefulCompressor):
            state["compressor"] = list(self._compressor.state_dict().items())
        return state

    def reset(self, state: Mapping[str, Any]) -> None:
        """Forgets all buckets, and loads states of the algorithm and compressor."""
        if state["residuals"] and bool(state["velocities"]) != (self._momentum > 0):
            raise ValueError("the state was saved with another momentum setting: with momentum there are velocities")
        if ("compressor" in state) != isinstance(self._compressor, StatefulCompressor):
            raise ValueError(f"the state was saved with another compressor than {self._compressor}")
        states = copy.deepcopy(dict(state["algorithm_state"]))
        for kept in states.values():
            self._entry.check_state(kept)
        if isinstance(self._compressor, StatefulCompressor):
            self._compressor.load_state_dict(dict(state["compressor"]))
        self._feedback = self._new_feedback()
        self._states, self._before, self._known, self._spans = states, {}, set(), {}

    def _facts_of(self, sent: SparseVector, k: int, *, whole: bool) -> str:
        what = sent.numel, sent.dtype, k, whole  # a compressor's density may change
        if what not in self._facts:
            said = self._entry.facts(f"numel={sent.numel}", f"{sent.dtype}", f"k={k}")
            self._facts[what] = f"{said} summed whole" if whole else said
        return self._facts[what]

    def _new_feedback(self) -> ErrorFeedback:
        return ErrorFeedback(self._compressor, momentum=self._momentum, tentative=self._tentative)


def _summed_whole(sent: SparseVector, rank: int, size: int) -> Schedule[Reduction]:
    """Dense sum in full precision when all elements are sent, as in a warm-up: indices would double its bytes."""
    own = torch.zeros(sent.numel, dtype=sent.dtype, device=sent.device)
    total = yield from schedules.allreduce(put(own, sent.indices, sent.values), rank, size)
    every = torch.arange(sent.numel, dtype=sent.indices.dtype, device=sent.device)
    nothing = SparseVector.empty(sent.numel, sent.dtype, device=sent.device)
    return Reduction(SparseVector(every, total, sent.numel), nothing)


@dataclass(frozen=True, eq=False)
class _Selected:
    """Transfer of a bucket's selected entries."""

    facts: str
    schedule: Schedule[Reduction]
    feedback: ErrorFeedback
    key: str
    size: int
    scale: float
    culprit: int
    summed: None = None

    def agreed(self, result: Reduction) -> Tensor:
        return result.total.values

    def own(self, result: Reduction) -> Tensor:
        return result.dropped.values

    def suspect(self) -> int:
        return self.culprit

    def end(self, result: Reduction, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean for the optimizer: scaled, and in the gradient's own dtype, which may overflow."""
        self.feedback.restore(self.key, result.dropped)
        mean = (result.total.values / self.size * self.scale).to(flat.dtype)
        return put(flat, result.total.indices, mean), mean
