"""The dense sum as a sparse allreduce: the baseline, and what the others become at density 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from communicators.dense_schedules import block_bounds, halving_doubling_allreduce, ring_allreduce
from communicators.schedule import SLOT_BYTES, Schedule, powers_of_two
from sparse_compress import SparseVector, topk
from torch import Tensor

from sparse_collectives.prediction.traffic import Traffic
from sparse_collectives.reduction import Reduction


def dense(
    sparse: SparseVector, rank: int, size: int, k: int, *, cost: Callable[[int], float] | None = None
) -> Schedule[Reduction]:
    """The exact sum, as a vector with all n entries; nothing is dropped.

    Halving and doubling where P is a power of two, the ring elsewhere (Thakur et al., IJHPCA 2005): 2n(P − 1)/P
    elements either way.

    k and cost do not matter here: the sum is never cut, and adding dense vectors costs next to nothing.
    """
    del k, cost
    total = yield from dense_sum(sparse.to_dense(), rank, size)
    nothing = SparseVector.empty(sparse.numel, sparse.dtype, device=sparse.device)
    return Reduction(topk(total, total.numel()), nothing)


def dense_sum(x: Tensor, rank: int, size: int) -> Schedule[Tensor]:
    """The sum of 1-D tensors over ranks, in memory of its own."""
    allreduce = ring_allreduce if size & (size - 1) else halving_doubling_allreduce
    return allreduce(x, rank, size)


def dense_sent(rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
    """2n(P − 1)/P elements where P divides n, else as the blocks fall, and one slot a message.

    Ring: all blocks but the next one, then all but the one after it, in 2(P − 1) messages. Halving and doubling: what
    is given away of ever shorter spans, then the spans that are kept, in 2 log P messages.
    """
    del k
    if size & (size - 1):
        lengths = [high - low for low, high in block_bounds(numel, size)]
        elements = 2 * numel - lengths[(rank + 1) % size] - lengths[(rank + 2) % size]
        messages = 2 * (size - 1)
    else:
        spans = _kept_spans(rank, size, numel)
        elements = numel - spans[-1] + sum(spans[1:])
        messages = 2 * (len(spans) - 1)
    return Traffic(elements * dtype.itemsize + messages * SLOT_BYTES, messages, messages)


def _kept_spans(rank: int, size: int, numel: int) -> list[int]:
    """Elements that recursive halving leaves to this rank: n, about n/2, …, about n/P."""
    low, high = 0, numel
    spans = [numel]
    for distance in reversed(list(powers_of_two(below=size))):
        middle = (low + high) // 2
        low, high = (middle, high) if rank & distance else (low, middle)
        spans.append(high - low)
    return spans
