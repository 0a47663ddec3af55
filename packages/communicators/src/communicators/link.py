"""The α-β model of a link: a message of b bytes takes α + β·b seconds (Hockney 1994); and its measurement."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from communicators.collectives import allgather
from communicators.communicator import Communicator, run
from communicators.origin import as_communicator
from communicators.schedule import SLOT_BYTES, Payload, Round, Schedule


@dataclass(frozen=True)
class Link:
    """Cost of a message. The default is 1 Gbit/s Ethernet at 50 µs.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
    """

    alpha: float = 50e-6
    beta: float = 8e-9

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(f"a link needs alpha >= 0 and beta >= 0 seconds, got {self.alpha} and {self.beta}")

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Time of `messages` messages, one after another, that hold `nbytes` bytes together."""
        return messages * self.alpha + self.beta * nbytes


def measure_link(
    comm: Any, *, nbytes: int = 1 << 20, repeats: int = 7, seconds: Callable[[int], float] | None = None
) -> Link:
    """α (seconds per message) and β (seconds per byte) of the slowest pair, the same on every rank.

    Neighbours 2i and 2i + 1 play ping-pong, all pairs at once, with the smallest message and with a large one, which
    grows up to 16 nbytes until it takes twice as long: latency, or others on the machine, would hide β.
    Collective. One rank alone has a link that costs nothing.

    Args:
        comm: See `as_communicator`; all ranks call.
        nbytes: Size of the large message on the wire.
        repeats: Number of measurements of which the median is taken.
        seconds: Measures a message with a body of so many bytes in another way than ping-pong; all ranks call it.
    """
    if nbytes < 2 * SLOT_BYTES or repeats < 1:
        raise ValueError(f"expected nbytes >= {2 * SLOT_BYTES} and repeats >= 1, got {nbytes} and {repeats}")
    comm = as_communicator(comm)
    if comm.size == 1:
        return Link(0.0, 0.0)
    measure, most = seconds or (lambda body: _one_way_seconds(comm, body, repeats)), 16 * nbytes
    while True:
        times = torch.tensor([measure(0), measure(nbytes - SLOT_BYTES)], dtype=torch.float64, device=comm.device)
        small, large = torch.stack(allgather(times, comm)).max(dim=0).values.tolist()
        if large >= 2 * small or nbytes >= most:
            beta = max(0.0, (large - small) / (nbytes - SLOT_BYTES))
            return Link(max(0.0, small - beta * SLOT_BYTES), beta)
        nbytes *= 4


def _one_way_seconds(comm: Communicator, nbytes: int, repeats: int) -> float:
    """Half a ping-pong of bodies of nbytes, median; 0 for the last of an odd number of ranks, which has no partner."""
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        begin = comm.clock()
        run(_ping_pong(comm.rank, comm.size, nbytes), comm, facts=f"ping-pong({nbytes})")
        seconds.append((comm.clock() - begin) / 2)
    return 0.0 if comm.rank ^ 1 >= comm.size else statistics.median(seconds[1:])


def _ping_pong(rank: int, size: int, nbytes: int) -> Schedule[None]:
    peer = rank ^ 1
    if peer >= size:
        return
    ping, pong = Round(sends={peer: Payload.of(torch.zeros(nbytes, dtype=torch.uint8))}), Round(recvs={peer: nbytes})
    first, second = (ping, pong) if rank < peer else (pong, ping)
    yield first
    yield second
