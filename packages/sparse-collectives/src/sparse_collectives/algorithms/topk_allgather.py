"""Top-k with an allgather (Top-kA): everybody's entries to everybody, then one exact sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from communicators.dense_schedules import allgather_blocks
from communicators.schedule import SLOT_BYTES, Elapse, Schedule
from sparse_compress import SparseVector, add_all

from sparse_collectives.prediction.traffic import Traffic
from sparse_collectives.reduction import Reduction
from sparse_collectives.wire.invalid import given_by
from sparse_collectives.wire.wire import PLAIN, Wire


def topk_allgather(
    sparse: SparseVector,
    rank: int,
    size: int,
    k: int,
    *,
    wire: Wire = PLAIN,
    cost: Callable[[int], float] | None = None,
) -> Schedule[Reduction]:
    """The exact sum of all selections, up to k·P entries; nothing is dropped (Renggli et al., SC 2019, section 5.3.1).

    ⌈log P⌉ rounds of Bruck's allgather; vectors are added as `add_all` does everywhere, so that float sums agree.

    wire: what it rounds off is dropped.
    sparse: min(k, n) entries; cost: seconds to merge so many entries, which a simulated world charges.
    """
    del k  # all vectors are as long as this one
    given, rest = wire.rounded(sparse)
    nbytes = wire.nbytes(len(sparse), sparse.numel, sparse.dtype)
    messages = yield from allgather_blocks(wire.message(given), [nbytes] * size, rank, size)
    vectors = [given] * size
    for source in (source for source in range(size) if source != rank):
        with given_by(source):
            vectors[source] = wire.vector(messages[source], len(sparse), sparse)
    total = add_all(vectors)
    if cost is not None:
        yield Elapse(cost(size * len(sparse) * (size - 1).bit_length()))
    return Reduction(total, rest)


def topk_allgather_sent(rank: int, size: int, k: int, numel: int, dtype: torch.dtype, *, wire: Wire = PLAIN) -> Traffic:
    """(P − 1) packed vectors, each with its header, in ⌈log P⌉ messages with a slot each; alike on every rank."""
    del rank
    rounds = (size - 1).bit_length()
    return Traffic((size - 1) * wire.nbytes(min(k, numel), numel, dtype) + rounds * SLOT_BYTES, rounds, rounds)


def topk_allgather_merged(rank: int, size: int, k: int, numel: int) -> int:
    """Entries that are summed: those of all ranks."""
    del rank
    return size * min(k, numel) * (size - 1).bit_length()
