"""A dense sum among ranks with unequal rates: who sends slowly sums little.

Every rank sums a share of the vector: all send it their part of that, and it sends the sum to all. With a share s it
sends and receives n·(1 + (P − 2)·s) elements, so a rank without one sends n, which it must in any case: half of what a
ring sends. With equal shares all send 2n(P − 1)/P, as in a ring. The vector goes in segments, the sums of one with the
parts of the next, so that ports are busy in both directions. It pays for vectors of megabytes among links that are
unlike: each segment is a round, which costs a delay.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from communicators.schedule import Payload, Round, Schedule

MOST_SEGMENTS, SEGMENT_NBYTES = 8, 1 << 18
HALVINGS = 200


def by_rate_allreduce(x: Tensor, rank: int, size: int, shares: Sequence[float]) -> Schedule[Tensor]:
    """Sum over ranks; rank r sums a share of `shares[r]`, added in rank order: the same bits everywhere.

    One round more than there are segments. Raises ValueError for wrong shares.
    """
    check_shares(shares, size)
    if size == 1:
        return x.clone()
    segments = max(1, min(MOST_SEGMENTS, x.nbytes // SEGMENT_NBYTES))
    bounds = [(s * x.numel() // segments, (s + 1) * x.numel() // segments) for s in range(segments)]
    order = [(rank + distance) % size for distance in range(1, size)]  # not all send to the same one first
    totals, own = list[Tensor](), x.new_empty(0)
    before: list[int] | None = None  # elements of each rank's span of the segment before
    for low, high in [*bounds, (0, 0)]:
        spans = share_bounds(high - low, shares)
        parts = [x[low + begin : low + end] for begin, end in spans]
        counts, sums = [len(part) for part in parts], before or [0] * size
        sends = {peer: Payload.of(torch.cat([parts[peer], own])) for peer in order if counts[peer] + len(own)}
        takes = {peer: (counts[rank] + sums[peer]) * x.itemsize for peer in order if counts[rank] + sums[peer]}
        received = yield Round(sends, takes)
        arrived = {peer: payload.view(x.dtype) for peer, payload in received.items()}
        if before is not None:
            totals += [own if peer == rank else arrived[peer][counts[rank] :] for peer in range(size) if sums[peer]]
        summands = [parts[rank] if peer == rank else arrived[peer][: counts[rank]] for peer in sorted([rank, *arrived])]
        own, before = _sum(summands) if counts[rank] else x.new_empty(0), counts
    return torch.cat([x.new_empty(0), *totals])


def _sum(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0].clone()
    for summand in summands[1:]:
        total += summand
    return total


def check_shares(shares: Sequence[float], size: int) -> None:
    """Raises ValueError for shares that are not one a rank, from 0 on, with the sum 1."""
    if len(shares) != size or not all(share >= 0 for share in shares) or not abs(sum(shares) - 1) <= 1e-6:
        raise ValueError(f"expected {size} shares from 0 on, whose sum is 1, got {list(shares)}")


def share_bounds(numel: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Bounds of the ranks' shares of numel elements, in rank order."""
    ends = [round(numel * min(1.0, end)) for end in accumulate(shares)]
    ends[-1] = numel
    return list(zip([0, *ends[:-1]], ends, strict=True))


def shares_by_rate(seconds: Sequence[float]) -> list[float]:
    """Shares with which `by_rate_allreduce` is fastest.

    The busiest rank takes max(w, M) seconds per byte, w those of the slowest and M = 2(P − 1)/Σ(1/w) where no rank is
    much slower than the others: no sum can take less.

    Args:
        seconds: Seconds per byte of each rank, in the slower of its two directions. Where one is 0, as of links that
            are too fast to be measured, shares are equal; so they are among two ranks, which send all elements once in
            any case.

    Raises:
        ValueError: Not one finite number from 0 on a rank.
    """
    size, seconds = len(seconds), list(map(float, seconds))
    if not seconds or not all(0 <= own < math.inf for own in seconds):
        raise ValueError(f"expected one finite number from 0 on for each rank, got {seconds}")
    if size <= 2 or not min(seconds):
        return [1 / size] * size
    low, high = min(seconds), size * max(seconds)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_shares(seconds, middle)) < 1 else (low, middle)
    shares = _shares(seconds, high)
    return [share / sum(shares) for share in shares]


def _shares(seconds: Sequence[float], busiest: float) -> list[float]:
    """Share with which each rank takes so many seconds per byte, 0 for one that takes as many without."""
    return [max(0.0, busiest / own - 1) / (len(seconds) - 2) for own in seconds]
