"""Top-k with an allgather (Top-kA): everybody's entries to everybody, then one exact sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from communicators.dense_schedules import allgather_blocks
from communicators.schedule import SLOT_BYTES, Schedule
from sparse_compress import SparseVector, add_all

from sparse_collectives.algorithm import Algorithm, Array
from sparse_collectives.algorithms.reference import sum_of_selections
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State
from sparse_collectives.traffic import Traffic
from sparse_collectives.wire.invalid import blame_rank


@dataclass(frozen=True)
class TopKAllgather(Algorithm):
    """The exact sum of all selections, up to k·P entries; nothing is dropped (Renggli et al., SC 2019, section 5.3.1).

    ⌈log P⌉ rounds of Bruck's allgather; vectors are added as `add_all` does everywhere, so that float sums agree.

    Args:
        wire: How vectors travel; what it rounds off is dropped.
    """

    name = "topk-allgather"
    takes_wire = True

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        own, rounded_off = self.wire.rounded(sparse)
        nbytes = self.wire.nbytes(len(sparse), sparse.numel, sparse.dtype)
        messages = yield from allgather_blocks(self.wire.message(own), [nbytes] * size, rank, size)
        vectors = [own] * size
        for source in (source for source in range(size) if source != rank):
            with blame_rank(source):
                vectors[source] = self.wire.vector(messages[source], len(sparse), sparse)
        return Reduction(add_all(vectors), rounded_off)

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """(P − 1) packed vectors, each with its header, in ⌈log P⌉ messages with a slot each; alike on every rank."""
        rounds = (size - 1).bit_length()
        nbytes = (size - 1) * self.wire.nbytes(min(k, numel), numel, dtype)
        return Traffic(nbytes + rounds * SLOT_BYTES, rounds, rounds)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """The vectors of all ranks, once a level of the sum's tree."""
        return size * min(k, numel) * (size - 1).bit_length()

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        return sum_of_selections(inputs, k)
