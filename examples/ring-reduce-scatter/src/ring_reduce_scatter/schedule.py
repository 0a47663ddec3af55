"""A ring's sparse reduce-scatter and allgather, and what they send: exactly, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from communicators import Elapse, Round, Schedule
from sparse_collectives import WIRES, Reduction, Traffic, Wire, given_by
from sparse_compress import SparseVector, add_all, concatenate, merge


def ring(
    sparse: SparseVector,
    rank: int,
    size: int,
    k: int,
    *,
    wire: Wire = WIRES["fp32"],
    cost: Callable[[int], float] | None = None,
) -> Schedule[Reduction]:
    """Block b of the index range is summed once, on its way round from rank b to rank b − 1; then all go round.

        reduce-scatter   t = 0 … P − 2: block r − t to rank r + 1; sum, cut ← merge(received, mine, budget)
        allgather        t = 0 … P − 2: block r + 1 − t to rank r + 1, as it came

    Every block travels with exactly its budget of entries, ⌈k/P⌉ or all that it has. What a merge cuts, and what the
    wire rounds off, is dropped by the one rank that did it. With dense blocks it is the ring of Thakur et al., IJHPCA
    2005.

    sparse: min(k, n) entries; wire: how blocks travel; cost: seconds to merge so many entries.
    """
    edges, budgets = edges_of(sparse.numel, size), budgets_of(sparse.numel, size, k)
    blocks, dropped = cut_into_blocks(sparse, edges, budgets)
    after, before = (rank + 1) % size, (rank - 1) % size
    nbytes = [wire.nbytes(budgets[b], edges[b + 1] - edges[b], sparse.dtype) for b in range(size)]
    for turn in range(size - 1):
        give, take = (rank - turn) % size, (rank - turn - 1) % size
        rounded, rest = wire.rounded(blocks[give])
        dropped[give].append(rest)
        received = yield Round({after: wire.message(rounded)}, {before: nbytes[take]})
        with given_by(before):
            theirs = wire.vector(received[before], budgets[take], blocks[take])
        blocks[take], cut = merge(theirs, blocks[take], budgets[take])
        dropped[take].append(cut)
        if cost is not None:
            yield Elapse(cost(2 * budgets[take]))
    if size > 1:
        blocks[after], rest = wire.rounded(
            blocks[after]
        )  # mine, which is whole now: all ranks get what it is rounded to
        dropped[after].append(rest)
        message = wire.message(blocks[after])
        for turn in range(size - 1):
            take = (rank - turn) % size
            message = (yield Round({after: message}, {before: nbytes[take]}))[before]
            with given_by(before):
                blocks[take] = wire.vector(message, budgets[take], blocks[take])
    return Reduction(concatenate(blocks), concatenate([add_all(parts) for parts in dropped]))


def edges_of(numel: int, size: int) -> list[int]:
    """Block b is [edges[b], edges[b + 1])."""
    return [b * numel // size for b in range(size + 1)]


def budgets_of(numel: int, size: int, k: int) -> list[int]:
    """Entries of every block, which n, P and k decide: so every rank knows what it will receive."""
    return [min(-(-k // size), high - low) for low, high in pairwise(edges_of(numel, size))]


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


def sent(rank: int, size: int, k: int, numel: int, dtype: torch.dtype, *, wire: Wire = WIRES["fp32"]) -> Traffic:
    """All blocks but the next one's, then all but the one after it: 2(P − 1) messages, each with its header."""
    edges, budgets = edges_of(numel, size), budgets_of(numel, size, k)
    nbytes = [wire.nbytes(budgets[b], edges[b + 1] - edges[b], dtype) for b in range(size)]
    messages = 2 * (size - 1)
    if size == 1:
        return Traffic(0, 0, 0)
    return Traffic(2 * sum(nbytes) - nbytes[(rank + 1) % size] - nbytes[(rank + 2) % size], messages, messages)


def merged(rank: int, size: int, k: int, numel: int) -> int:
    """Entries that the merges of a rank take in: two blocks each, of all blocks but its own."""
    budgets = budgets_of(numel, size, k)
    return 2 * (sum(budgets) - budgets[rank])
