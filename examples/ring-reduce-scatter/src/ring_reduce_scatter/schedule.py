"""A ring's sparse reduce-scatter and allgather, and what they send: exactly, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from communicators import Round, Schedule
from sparse_collectives import Algorithm, Reduction, Traffic, blame_rank
from sparse_compress import SparseVector, add_all, concatenate, merge

from ring_reduce_scatter.reference import Array, reference
from ring_reduce_scatter.sizes import budgets_of, edges_of


class Ring(Algorithm):
    """Block b of the index range is summed once, on its way round from rank b to rank b − 1; then all go round.

        reduce-scatter   t = 0 … P − 2: block r − t to rank r + 1; sum, cut ← merge(received, mine, budget)
        allgather        t = 0 … P − 2: block r + 1 − t to rank r + 1, as it came

    Every block travels with exactly its budget of entries, ⌈k/P⌉ or all that it has. What a merge cuts, and what the
    wire rounds off, is dropped by the one rank that did it. With dense blocks it is the ring of Thakur et al., IJHPCA
    2005.
    """

    name = "ring-reduce-scatter"
    takes_wire = True

    def schedule(self, sparse: SparseVector, rank: int, size: int, k: int, state: None = None) -> Schedule[Reduction]:
        """One call on one rank; sparse: min(k, n) entries."""
        edges, budgets, wire = edges_of(sparse.numel, size), budgets_of(sparse.numel, size, k), self.wire
        blocks, dropped = cut_into_blocks(sparse, edges, budgets)
        after, before = (rank + 1) % size, (rank - 1) % size
        nbytes = [wire.nbytes(budgets[b], edges[b + 1] - edges[b], sparse.dtype) for b in range(size)]
        for turn in range(size - 1):
            give, take = (rank - turn) % size, (rank - turn - 1) % size
            rounded, error = wire.rounded(blocks[give])
            dropped[give].append(error)
            received = yield Round({after: wire.message(rounded)}, {before: nbytes[take]})
            with blame_rank(before):
                theirs = wire.vector(received[before], budgets[take], blocks[take])
            blocks[take], cut = merge(theirs, blocks[take], budgets[take])
            dropped[take].append(cut)
        if size > 1:  # my block is complete now: all ranks get what it is rounded to
            blocks[after], error = wire.rounded(blocks[after])
            dropped[after].append(error)
            message = wire.message(blocks[after])
            for turn in range(size - 1):
                take = (rank - turn) % size
                message = (yield Round({after: message}, {before: nbytes[take]}))[before]
                with blame_rank(before):
                    blocks[take] = wire.vector(message, budgets[take], blocks[take])
        return Reduction(concatenate(blocks), concatenate([add_all(parts) for parts in dropped]))

    def sent(self, rank: int, size: int, k: int, numel: int, dtype: torch.dtype) -> Traffic:
        """All blocks but the next one's, then all but the one after it: 2(P − 1) messages, each with its header."""
        edges, budgets, messages = edges_of(numel, size), budgets_of(numel, size, k), 2 * (size - 1)
        nbytes = [self.wire.nbytes(budgets[b], edges[b + 1] - edges[b], dtype) for b in range(size)]
        if size == 1:
            return Traffic(0, 0, 0)
        given = 2 * sum(nbytes) - nbytes[(rank + 1) % size] - nbytes[(rank + 2) % size]
        return Traffic.of_bodies(given, messages, messages)

    def merged(self, rank: int, size: int, k: int, numel: int) -> int:
        """Entries that the merges of a rank take in: two blocks each, of all blocks but its own."""
        budgets = budgets_of(numel, size, k)
        return 2 * (sum(budgets) - budgets[rank])

    def reference(self, inputs: Sequence[Array], k: int) -> Array:
        """The same total without messages, in NumPy."""
        return reference(inputs, k)


def cut_into_blocks(
    sparse: SparseVector, edges: list[int], budgets: list[int]
) -> tuple[list[SparseVector], list[list[SparseVector]]]:
    """(blocks of exactly their budgets, indices counted from each block's edge; what was cut of each, in a list).

    How many entries lie in a block is read back from a GPU, once.
    """
    lows = torch.tensor(edges, dtype=torch.int32, device=sparse.device)
    places = torch.searchsorted(sparse.indices, lows).tolist()
    blocks, cuts = [], []
    for (low, high), (first, last), budget in zip(pairwise(edges), pairwise(places), budgets, strict=True):
        block = SparseVector(sparse.indices[first:last] - low, sparse.values[first:last], high - low)
        nothing = SparseVector.empty(high - low, sparse.dtype, device=sparse.device)
        kept, cut = merge(block, nothing, budget)
        blocks.append(kept)
        cuts.append([cut])
    return blocks, cuts
