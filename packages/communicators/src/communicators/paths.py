"""Rates and delays of unequal links, measured pair by pair and in both directions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from communicators.collectives import allgather
from communicators.link import Path, ping_pong_seconds
from communicators.origin import as_communicator
from communicators.schedule import SLOT_BYTES


@dataclass(frozen=True)
class Paths:
    """Paths between all ranks: (source, target) -> `Path`, so that a `SimulatedWorld` takes it.

    Attributes:
        alpha: Seconds per message, `[source][target]`.
        up: Seconds per byte that each rank sends.
        down: Seconds per byte that each rank receives.
    """

    alpha: tuple[tuple[float, ...], ...]
    up: tuple[float, ...]
    down: tuple[float, ...]

    def __call__(self, source: int, target: int) -> Path:
        return Path(self.alpha[source][target], self.up[source], self.down[target])

    @property
    def slower(self) -> list[float]:
        """Seconds per byte of each rank, in the slower of its two directions: what `shares_by_rate` takes."""
        return [max(both) for both in zip(self.up, self.down, strict=True)]


def measure_paths(comm: Any, *, nbytes: int = 1 << 19, repeats: int = 3) -> Paths:
    """Measures the paths between all ranks, the same result on every rank. Collective.

    Pairs take turns, all ranks in one at a time: a small message there and back, then a large one each way with a small
    answer. A rank sends as fast as to the peer that takes it fastest, and receives likewise; where all its peers are
    slower than itself, its own rate does not show, and does not matter. The first large message, in which TCP's window
    grows, does not count. In all 2(repeats + 1)(P − 1)·nbytes bytes of each rank.

    Args:
        comm: See `as_communicator`; all ranks call.
        nbytes: Size of a large message.
        repeats: Number of measurements of which the median is taken.

    Raises:
        ValueError: nbytes or repeats is too small.
    """
    if nbytes < 2 * SLOT_BYTES or repeats < 1:
        raise ValueError(f"expected nbytes >= {2 * SLOT_BYTES} and repeats >= 1, got {nbytes} and {repeats}")
    comm = as_communicator(comm)
    rank, size = comm.rank, comm.size
    found = torch.zeros(2, size, dtype=torch.float64, device="cpu")
    for peer in _partners(rank, size):
        small = ping_pong_seconds(comm, peer, 0, 0, first=rank < peer, repeats=repeats)
        for sender in sorted((rank, peer)):
            large = ping_pong_seconds(comm, peer, nbytes, 0, first=rank == sender, repeats=repeats)
            if rank == sender and peer < size:
                found[0, peer], found[1, peer] = small / 2, max(0.0, large - small) / nbytes
    rows = torch.stack(allgather(found.to(comm.device).view(-1), comm)).cpu().view(size, 2, size)
    alpha, beta = rows[:, 0], rows[:, 1]
    beta.fill_diagonal_(torch.inf)
    up, down = ([0.0] * size if size == 1 else beta.amin(along).tolist() for along in (1, 0))
    return Paths(tuple(map(tuple, alpha.tolist())), tuple(up), tuple(down))


def _partners(rank: int, size: int) -> Iterator[int]:
    """Every other rank once, so that all are in one pair at a time (the circle method of round-robin tournaments).

    Among an odd number each is alone once: its partner then is the rank that there is not.
    """
    places = size + size % 2
    for turn in range(places - 1):
        if rank == places - 1:
            peer = turn * (places // 2) % (places - 1)
        else:
            peer = (turn - rank) % (places - 1)
            peer = places - 1 if peer == rank else peer
        yield peer
