"""Top-k, dynamic sparse allreduce (Top-kDSA): every block is summed at its owner, then gathered; exact."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from communicators import Payload, Round, Schedule, schedules
from sparse_compress import SparseVector, add, union_of, vectors
from torch import Tensor

from sparse_collectives.algorithm import Algorithm, Array, Reduction, State, Traffic
from sparse_collectives.algorithms.reference import sum_of_selections
from sparse_collectives.wire import RAW, InvalidMessageError, Span, Wire, blame_rank


@dataclass(frozen=True)
class TopKDSA(Algorithm):
    """The exact sum of all selections; nothing is dropped (SparCML: Renggli et al., SC 2019, section 5.3.2).

        split        block j of the index range to rank j, P − 1 messages; rank j adds them (`add_all`)
        all-gather   of the sums' sizes, 8 bytes each, then of the sums: ⌈log P⌉ rounds each (Bruck)

    A block goes dense, as its values alone, where its entries would take as many bytes or more.
    Differs from the published code, which selects by a strict > and so loses the k-th value and those that tie with it.

    Args:
        wire: How vectors travel; what it rounds off, of the selection and of the own block's sum, is dropped.
    """

    name = "topk-dsa"
    takes_wire = True
    exact = False

    def schedule(
        self, sparse: SparseVector, rank: int, size: int, k: int, state: State | None = None
    ) -> Schedule[Reduction]:
        wire, bounds = self.wire, schedules.block_bounds(sparse.numel, size)
        own, dropped = wire.rounded(sparse)
        given, (low, high) = vectors.split(own, bounds), bounds[rank]
        capacity = block_nbytes(len(own), high - low, sparse.dtype, wire) + wire.overhead
        bodies = yield from split(lambda to: _encode(given[to], bounds[to], wire), capacity, rank, size)
        for source, body in bodies.items():
            given[source] = _decode(body, bounds[rank], sparse, wire, source)
        total, rounded_off = wire.rounded(union_of(given))
        lengths = [wire.dense_nbytes(high - low, sparse.dtype) for low, high in bounds]
        sums = yield from _gather(_encode(total, bounds[rank], wire), lengths, rank, size)
        blocks = [_decode(sums[r], span, sparse, wire, r) for r, span in enumerate(bounds)]
        return Reduction(vectors.join(blocks), add(dropped, rounded_off))

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """The most that `topk_dsa_traffic` can be: nobody selects in its own block, and no two ranks select alike."""
        if size == 1:
            return Traffic(0, 0, 0)
        lengths = [high - low for low, high in schedules.block_bounds(numel, size)]
        gathered = topk_dsa_traffic(rank, size, numel, dtype, [0] * size, [k * size] * size, wire=self.wire)
        given = block_nbytes(k, numel - lengths[rank], dtype, self.wire)
        messages = gathered.messages * self.wire.overhead
        return gathered._replace(nbytes=gathered.nbytes + given + messages)

    def typical(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """`topk_dsa_traffic` of random selections: n(1 − (1 − k/n)^P) entries in the sum, spread evenly."""
        k = min(k, numel)
        union = round(numel * (1 - (1 - k / numel) ** size))
        spread = [[high - low for low, high in schedules.block_bounds(entries, size)] for entries in (k, union)]
        return topk_dsa_traffic(rank, size, numel, dtype, spread[0], spread[1], self.wire)

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        return sum_of_selections(inputs, k)


def split(block: Callable[[int], Tensor], capacity: int, rank: int, size: int) -> Schedule[dict[int, Tensor]]:
    """Block j to rank j, P − 1 messages: the bytes that this rank gets, of at most `capacity`, by their sender."""
    bodies = {}
    for distance in range(1, size):  # so that no two ranks send to the same one at a time
        to, source = (rank + distance) % size, (rank - distance) % size
        received = yield Round({to: Payload.of(block(to))}, {source: capacity}, bounded=True)
        bodies[source] = received[source].body
    return bodies


def block_nbytes(entries: int, length: int, dtype: torch.dtype, wire: Wire = RAW) -> int:
    """Bytes of a block: sparse, 8 an entry (float64: 12), or dense, 4 an element (8), whichever is less."""
    return min(wire.block_nbytes(min(entries, length), length, dtype), wire.dense_nbytes(length, dtype))


def _encode(block: SparseVector, span: Span, wire: Wire) -> Tensor:
    """The entries in the span as bytes; dense ones are as many as the dense block has, sparse ones fewer."""
    low, high = span
    if wire.block_nbytes(len(block), high - low, block.dtype) < wire.dense_nbytes(high - low, block.dtype):
        return wire.block(block, span)
    dense = torch.zeros(high - low, dtype=block.dtype, device=block.device)
    return wire.dense(dense.index_copy_(0, block.indices.long() - low, block.values))


def _decode(encoded: Tensor, span: Span, like: SparseVector, wire: Wire, rank: int) -> SparseVector:
    """Decodes a rank's bytes; InvalidMessageError if they are not a block."""
    low, high = span
    dense_nbytes = wire.dense_nbytes(high - low, like.dtype)
    if encoded.numel() > dense_nbytes:
        raise InvalidMessageError(rank, f"a block of {encoded.numel()} bytes, expected at most {dense_nbytes}")
    with blame_rank(rank):
        if encoded.numel() < dense_nbytes:
            return wire.entries(encoded, span, like)
        indices = torch.arange(low, high, dtype=torch.int32, device=encoded.device)
        return vectors.of_entries(indices, wire.values(encoded, high - low, like), like.numel)


def _gather(block: Tensor, most: Sequence[int], rank: int, size: int) -> Schedule[list[Tensor]]:
    """All ranks' blocks, in rank order; their sizes go first. most: bytes that each can have, known beforehand."""
    own = torch.tensor([block.numel()], device="cpu").view(torch.uint8).to(block.device)
    sizes = yield from schedules.allgather_blocks(own, [own.numel()] * size, rank, size)
    nbytes: list[int] = torch.cat(sizes).view(torch.int64).tolist()
    for source, (said, limit) in enumerate(zip(nbytes, most, strict=True)):
        if not 0 <= said <= limit:  # not a byte is made room for because a message says so
            raise InvalidMessageError(source, f"a block of {said} bytes, expected 0 … {limit}")
    return (yield from schedules.allgather_blocks(block, nbytes, rank, size))


def topk_dsa_traffic(
    rank: int, size: int, numel: int, dtype: torch.dtype, given: Sequence[int], summed: Sequence[int], wire: Wire = RAW
) -> Traffic:
    """Exact traffic of a rank. given: its entries in each block; summed: entries of each block's sum.

    It sends its other blocks, then Bruck's share of the sizes and of the sums, in (P − 1) + 2⌈log P⌉ messages with a
    slot each.
    """
    lengths = [high - low for low, high in schedules.block_bounds(numel, size)]
    split_nbytes, sum_nbytes = (
        [block_nbytes(entries, length, dtype, wire) for entries, length in zip(counts, lengths, strict=True)]
        for counts in (given, summed)
    )
    splits = Traffic.of_bodies(sum(split_nbytes) - split_nbytes[rank], size - 1, size - 1)
    return Traffic.total(splits, Traffic.allgather([8] * size, rank), Traffic.allgather(sum_nbytes, rank))
