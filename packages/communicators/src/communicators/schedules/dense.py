"""Dense collectives as schedules: the same bits in every world.

Ring, halving-doubling and doubling allreduce, binomial broadcast, Bruck allgather (Thakur, Rabenseifner & Gropp, IJHPCA
2005; Bruck et al., IEEE TPDS 1997). Tensors are 1-D, contiguous, of any dtype that adds.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from communicators.errors import CollectiveError
from communicators.schedule import Payload, Round, Schedule, largest_power_of_two, powers_of_two

MOST_NBYTES = 1 << 40
"""Most bytes of one rank's part of a gather; a larger size from a peer is not trusted."""
DOUBLING_NBYTES = 1 << 14
"""Most bytes that a rank sends by doubling, n log P: with as many in half the rounds it is no slower where α/β, a
message's handling included, is at least 5 KB; 1 Gbit/s and 0.1 ms have 12, 100 Mbit/s and 1 ms too."""
RING_NBYTES = 1 << 16
"""Size from which bandwidth counts more than rounds, so that a P that is no power of two takes the ring."""


def allreduce(x: Tensor, rank: int, size: int) -> Schedule[Tensor]:
    """Sum over ranks, the way that suits P and the size."""
    if doubles(x.nbytes, size):
        return doubling_allreduce(x, rank, size)
    if size & (size - 1) and x.nbytes >= RING_NBYTES:
        return ring_allreduce(x, rank, size)
    return halving_doubling_allreduce(x, rank, size)


def doubles(nbytes: int, size: int) -> bool:
    """Whether `allreduce` sums so many bytes by doubling."""
    return nbytes * (largest_power_of_two(size).bit_length() - 1) <= DOUBLING_NBYTES


def ring_allreduce(x: Tensor, rank: int, size: int) -> Schedule[Tensor]:
    """Sum over ranks: reduce-scatter, then allgather, 2(P − 1) rounds, 2n(P − 1)/P elements sent.

    Block b is summed once, on its way round the ring from rank b, so every rank gets the same bits.
    """
    if size == 1:
        return x.clone()
    bounds = block_bounds(x.numel(), size)
    blocks = [Payload.of(x[low:high]) for low, high in bounds]
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(2 * (size - 1)):
        give, take = (rank - turn) % size, (rank - turn - 1) % size
        low, high = bounds[take]
        received = yield Round({after: blocks[give]}, {before: (high - low) * x.dtype.itemsize})
        if turn < size - 1:
            received[before].view(x.dtype).add_(blocks[take].view(x.dtype))
        blocks[take] = received[before]
    return torch.cat([block.view(x.dtype) for block in blocks])


def halving_doubling_allreduce(x: Tensor, rank: int, size: int) -> Schedule[Tensor]:
    """Sum over ranks: recursive halving, then doubling (Rabenseifner), 2 log P rounds, 2n(P − 1)/P elements sent.

    Ranks beyond the largest power of two fold into a partner first and get the result last (2 more rounds of n).
    """
    return (yield from _folded(_halving_doubling, x, rank, size))


def doubling_allreduce(x: Tensor, rank: int, size: int) -> Schedule[Tensor]:
    """Sum over ranks: recursive doubling, log P rounds of all n elements; halving's bits, but for those of a NaN.

    Ranks beyond the largest power of two fold likewise.
    """
    return (yield from _folded(_doubling, x, rank, size))


def _halving_doubling(total: Tensor, rank: int, group: int) -> Schedule[Tensor]:
    low, high = 0, total.numel()
    spans, itemsize = [(low, high)], total.dtype.itemsize
    for distance in reversed(list(powers_of_two(below=group))):
        peer, middle = rank ^ distance, (low + high) // 2
        keep, give = (low, middle), (middle, high)
        if rank & distance:
            keep, give = give, keep
        payload = Payload.of(total[slice(*give)])
        received = yield Round({peer: payload}, {peer: (keep[1] - keep[0]) * itemsize})
        low, high = keep
        total[low:high] += received[peer].view(total.dtype)
        spans.append(keep)
    for distance in powers_of_two(below=group):
        peer = rank ^ distance
        own, whole = spans.pop(), spans[-1]
        theirs = (own[1], whole[1]) if own[0] == whole[0] else (whole[0], own[0])
        nbytes = (theirs[1] - theirs[0]) * itemsize
        received = yield Round({peer: Payload.of(total[slice(*own)])}, {peer: nbytes})
        total[slice(*theirs)] = received[peer].view(total.dtype)
    return total


def _doubling(total: Tensor, rank: int, group: int) -> Schedule[Tensor]:
    for distance in reversed(list(powers_of_two(below=group))):
        peer = rank ^ distance
        received = yield Round({peer: Payload.of(total)}, {peer: total.nbytes})
        theirs = received[peer].view(total.dtype)
        total = total + theirs if rank < peer else theirs + total  # of two NaN the same one everywhere
    return total


def broadcast(x: Tensor, rank: int, size: int, root: int = 0) -> Schedule[Tensor]:
    """The root's tensor on every rank, by a binomial tree in ⌈log P⌉ rounds. x elsewhere gives size and dtype."""
    virtual = (rank - root) % size
    payload = Payload.of(x)
    for distance in powers_of_two(below=size):
        if virtual < distance and virtual + distance < size:
            yield Round(sends={(rank + distance) % size: payload})
        elif distance <= virtual < 2 * distance:
            parent = (rank - distance) % size
            payload = (yield Round(recvs={parent: payload.nbytes}))[parent]
    return payload.clone().view(x.dtype)  # sends of the payload may go on when the call is over


def barrier(rank: int, size: int) -> Schedule[None]:
    """Ends when all ranks have begun: every rank hears of every other (Hensgen, Finkel & Manber, 1988).

    ⌈log P⌉ rounds of empty messages, any P.
    """
    for distance in powers_of_two(below=size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield Round({to: Payload.allocate(0)}, {source: 0})


def allgather(x: Tensor, rank: int, size: int) -> Schedule[list[Tensor]]:
    """Every rank's tensor, in rank order; numels may differ. One Bruck gather of the sizes, one of the elements."""
    mine = torch.tensor([x.numel() * x.dtype.itemsize], device="cpu").view(torch.uint8)
    sizes = yield from allgather_blocks(mine.to(x.device), [mine.numel()] * size, rank, size)
    nbytes = [int(block.clone().view(torch.int64)) for block in sizes]
    for source, size_of_one in enumerate(nbytes):
        if not 0 <= size_of_one <= MOST_NBYTES or size_of_one % x.dtype.itemsize:
            raise CollectiveError(f"rank {source} says that it has {size_of_one} bytes of {x.dtype} to gather")
    blocks = yield from allgather_blocks(x.view(torch.uint8), nbytes, rank, size)
    return [block.clone().view(x.dtype) for block in blocks]


def allgather_blocks(block: Tensor, nbytes: Sequence[int], rank: int, size: int) -> Schedule[list[Tensor]]:
    """Every rank's block of bytes, in rank order, by Bruck's algorithm in ⌈log P⌉ rounds.

    block: 1-D uint8 of nbytes[rank] bytes; nbytes, of all ranks, is known everywhere. Any P. Sends Σ nbytes of the
    blocks handed on, and one slot a round. The blocks that return are views.
    """
    blocks = [block]  # those of ranks rank, rank + 1, …
    for distance in powers_of_two(below=size):
        count = min(distance, size - distance)
        to, source = (rank - distance) % size, (rank + distance) % size
        coming = [nbytes[(source + i) % size] for i in range(count)]
        payload = Payload.of(torch.cat(blocks[:count]) if count > 1 else block)
        received = yield Round({to: payload}, {source: sum(coming)})
        blocks += torch.split(received[source].body, coming)
    return [blocks[(r - rank) % size] for r in range(size)]


def block_bounds(numel: int, blocks: int) -> list[tuple[int, int]]:
    """Bounds of equal blocks: block b is [⌊b·n/B⌋, ⌊(b + 1)·n/B⌋)."""
    return [(b * numel // blocks, (b + 1) * numel // blocks) for b in range(blocks)]


def _folded(inner: Callable[[Tensor, int, int], Schedule[Tensor]], x: Tensor, rank: int, size: int) -> Schedule[Tensor]:
    """`inner` among the largest power of two of ranks; each beyond gives x to a partner, and gets the result last."""
    group, partner = largest_power_of_two(size), rank ^ largest_power_of_two(size)
    if rank >= group:
        yield Round(sends={partner: Payload.of(x)})
        received = yield Round(recvs={partner: x.nbytes})
        return received[partner].view(x.dtype)
    total = x.clone()
    if partner < size:
        received = yield Round(recvs={partner: x.nbytes})
        total += received[partner].view(x.dtype)
    total = yield from inner(total, rank, group)
    if partner < size:
        yield Round(sends={partner: Payload.of(total)})
    return total
