"""Top-k, dynamic sparse allreduce (Top-kDSA): every block is summed at its owner, then gathered; exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from communicators.dense import allgather, block_bounds
from communicators.schedule import SLOT_BYTES, Elapse, Round, Schedule, frame
from sparse_compress import SparseVector, add
from torch import Tensor

from sparse_collectives.entries import assemble, body_nbytes, body_of, from_body, join, split
from sparse_collectives.reduction import Reduction
from sparse_collectives.traffic import Traffic, bruck_sent, together


def topk_dsa(
    sparse: SparseVector, rank: int, size: int, k: int, *, cost: Callable[[int], float] | None = None
) -> Schedule[Reduction]:
    """The exact sum of all selections; nothing is dropped (SparCML: Renggli et al., SC 2019, section 5.3.2).

        split        block j of the index range to rank j, P − 1 messages; rank j adds them in rank order
        all-gather   of the sums' sizes, 8 bytes each, then of the sums: ⌈log P⌉ rounds each (Bruck)

    A block goes dense, as its values alone, where its entries would take as many bytes or more.
    Differs from the published code, which selects by a strict > and so loses the k-th value and those that tie with it.

    sparse: min(k, n) entries; cost: seconds to merge so many entries, which a simulated world charges.
    """
    del k  # all vectors are as long as this one
    bounds = block_bounds(sparse.numel, size)
    blocks, (low, high) = split(sparse, bounds), bounds[rank]
    given = {rank: blocks[rank]}
    capacity = SLOT_BYTES + block_nbytes(len(sparse), high - low, sparse.dtype)
    for distance in range(1, size):  # so that no two ranks send to the same one at a time
        to, source = (rank + distance) % size, (rank - distance) % size
        payload = frame(_encode(blocks[to], *bounds[to]))
        received = yield Round({to: payload}, {source: capacity}, bounded=True)
        given[source] = _decode(received[source][SLOT_BYTES:], low, high, like=sparse)
    total = reduce(add, (given[source] for source in range(size)))
    if cost is not None:
        yield Elapse(cost(sum(map(len, given.values()))))
    sums = yield from allgather(_encode(total, low, high), rank, size)
    decoded = [_decode(block, *edges, like=sparse) for block, edges in zip(sums, bounds, strict=True)]
    return Reduction(join(decoded), SparseVector.empty(sparse.numel, sparse.dtype, device=sparse.device))


def block_nbytes(entries: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of a block: sparse, 8 an entry (float64: 12), or dense, 4 an element (8), whichever is less."""
    return min(body_nbytes(entries, dtype), length * dtype.itemsize)


def _encode(block: SparseVector, low: int, high: int) -> Tensor:
    """The entries of [low, high) as bytes; dense ones are as many as the dense block has, sparse ones fewer."""
    if body_nbytes(len(block), block.dtype) < (high - low) * block.dtype.itemsize:
        return body_of(block)
    dense = torch.zeros(high - low, dtype=block.dtype, device=block.device)
    return dense.index_copy_(0, block.indices.long() - low, block.values).view(torch.uint8)


def _decode(encoded: Tensor, low: int, high: int, like: SparseVector) -> SparseVector:
    if encoded.numel() < (high - low) * like.dtype.itemsize:
        return from_body(encoded, like)
    indices = torch.arange(low, high, dtype=torch.int32, device=encoded.device)
    return assemble(indices, encoded.clone().view(like.dtype), like.numel)


def topk_dsa_traffic(
    rank: int, size: int, numel: int, dtype: torch.dtype, given: Sequence[int], summed: Sequence[int]
) -> Traffic:
    """What a rank sends, exactly, where it gives so many entries to each block and the sums have so many.

    Its other blocks, then Bruck's share of the sizes and of the sums; (P − 1) + 2⌈log P⌉ messages with a slot each.
    """
    lengths = [high - low for low, high in block_bounds(numel, size)]
    split_nbytes, sum_nbytes = (
        [block_nbytes(entries, length, dtype) for entries, length in zip(counts, lengths, strict=True)]
        for counts in (given, summed)
    )
    splits = sum(split_nbytes) - split_nbytes[rank] + (size - 1) * SLOT_BYTES
    return together(Traffic(splits, size - 1, size - 1), bruck_sent([8] * size, rank), bruck_sent(sum_nbytes, rank))


def topk_dsa_sent(rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
    """The most that `topk_dsa_traffic` can be: nobody selects in its own block, and no two ranks select alike."""
    lengths = [high - low for low, high in block_bounds(numel, size)]
    gathered = topk_dsa_traffic(rank, size, numel, dtype, [0] * size, [k * size] * size)
    given = block_nbytes(min(k, numel), numel - lengths[rank], dtype)
    return gathered._replace(nbytes=gathered.nbytes + (given if size > 1 else 0))


def topk_dsa_typical(rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
    """`topk_dsa_traffic` where every rank selects at random: n(1 − (1 − k/n)^P) entries in the sum, spread evenly."""
    k = min(k, numel)
    union = round(numel * (1 - (1 - k / numel) ** size))
    spread = [[high - low for low, high in block_bounds(entries, size)] for entries in (k, union)]
    return topk_dsa_traffic(rank, size, numel, dtype, *spread)


def topk_dsa_merged(rank: int, size: int, k: int, numel: int) -> int:
    """Entries that a rank sums where selections spread evenly: its block's share of all ranks'."""
    del rank, size
    return min(k, numel)
