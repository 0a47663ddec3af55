"""Top-k with an allgather (Top-kA): everybody's entries to everybody, then one exact sum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from communicators import SLOT_BYTES, Payload, Schedule, schedules
from sparse_compress import SparseVector, add_all

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic
from sparse_collectives.algorithms.reference import sum_of_selections
from sparse_collectives.wire import blame_rank


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
        message = self.wire.message(own)
        messages = yield from schedules.allgather_blocks(message.memory, [message.wire_nbytes] * size, rank, size)
        vectors = [own] * size
        for source in (source for source in range(size) if source != rank):
            with blame_rank(source):
                vectors[source] = self.wire.vector(Payload(messages[source]), len(sparse), sparse)
        return Reduction(add_all(vectors), rounded_off)

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """(P − 1) messages, each with its slot, in ⌈log P⌉ messages; alike on every rank."""
        rounds = (size - 1).bit_length()
        nbytes = (size - 1) * (SLOT_BYTES + self.wire.nbytes(min(k, numel), numel, dtype))
        return Traffic.of_bodies(nbytes, rounds, rounds)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """The vectors of all ranks, once a level of the sum's tree."""
        return size * min(k, numel) * (size - 1).bit_length()

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        return sum_of_selections(inputs, k)
