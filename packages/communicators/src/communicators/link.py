"""The α-β model of a link: a message of b bytes takes α + β·b seconds (Hockney 1994); and its measurement."""

import math
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
        if not (0 <= self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ValueError(f"a link needs finite alpha >= 0 and beta >= 0 s, got {self.alpha} and {self.beta}")

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Time of `messages` messages, one after another, that hold `nbytes` bytes together."""
        return messages * self.alpha + self.beta * nbytes


@dataclass(frozen=True)
class Path:
    """Cost of a message from one rank to another, where ranks send and receive at rates of their own.

    A message takes alpha + max(up, down)·bytes; its sender is busy for alpha + up·bytes, its receiver for
    alpha + down·bytes.

    Attributes:
        alpha: Seconds per message.
        up: Seconds per byte of the sender.
        down: Seconds per byte of the receiver.
    """

    alpha: float
    up: float
    down: float

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.alpha, self.up, self.down)):
            raise ValueError(f"a path needs finite alpha, up and down >= 0 seconds, got {self}")

    def seconds(self, nbytes: int) -> float:
        """Time of a message of so many bytes."""
        return self.alpha + max(self.up, self.down) * nbytes


def measure_link(
    comm: Any, *, nbytes: int = 1 << 20, repeats: int = 7, seconds: Callable[[int], float] | None = None
) -> Link:
    """α (seconds per message) and β (seconds per byte) of the slowest pair, the same on every rank.

    Neighbours 2i and 2i + 1 play ping-pong, all pairs at once: α is of the smallest message, β of a large one and a
    quarter of it, both of which may wait for the receiver's word. These grow up to 16 nbytes until the large one takes
    twice as long everywhere: latency, or others on the machine, would hide β, which is 0 where even that does not show
    it. Collective. One rank alone has a link that costs nothing.

    Args:
        comm: See `as_communicator`; all ranks call.
        nbytes: Size on the wire of the large message at first.
        repeats: Number of ping-pongs of which the median is taken.
        seconds: In place of ping-pong, and of repeats: (bytes of a body, 0 for the smallest message) -> seconds that
            a message takes one way; all ranks call it.

    Raises:
        ValueError: nbytes or repeats is too small.
    """
    if nbytes < 2 * SLOT_BYTES or repeats < 1:
        raise ValueError(f"expected nbytes >= {2 * SLOT_BYTES} and repeats >= 1, got {nbytes} and {repeats}")
    comm = as_communicator(comm)
    if comm.size == 1:
        return Link(0.0, 0.0)
    measure, most = seconds or (lambda body: _one_way_seconds(comm, body, repeats)), 16 * nbytes
    while True:
        part = max(SLOT_BYTES, nbytes // 4)
        seen = [measure(0), *(measure(size - SLOT_BYTES) for size in (part, nbytes))]
        times = torch.tensor(seen, dtype=torch.float64, device=comm.device)
        small, quarter, large = torch.stack(allgather(times, comm)).unbind(dim=1)
        if nbytes >= most or bool((large >= 2 * quarter).all()):
            beta = ((large - quarter) / (nbytes - part)).clamp(min=0)
            alpha = (small - beta * SLOT_BYTES).clamp(min=0)
            return Link(float(alpha.max()), float(beta.max()))
        nbytes *= 4


def _one_way_seconds(comm: Communicator, nbytes: int, repeats: int) -> float:
    """Half a ping-pong of bodies of nbytes, median; 0 for the last of an odd number of ranks, which has no partner."""
    peer = comm.rank ^ 1
    seconds = ping_pong_seconds(comm, peer, nbytes, nbytes, first=comm.rank < peer, repeats=repeats)
    return 0.0 if peer >= comm.size else seconds / 2


def ping_pong_seconds(comm: Communicator, peer: int, ping: int, pong: int, *, first: bool, repeats: int) -> float:
    """Median seconds of a ping of so many bytes to a peer, and its pong; `first` sends the ping, and its seconds count.

    One more goes before: both are here then, and TCP's window has grown. All ranks call it alike, also one without a
    partner, whose peer is no rank.
    """
    there, back = (Payload.of(torch.zeros(nbytes, dtype=torch.uint8, device="cpu")) for nbytes in (ping, pong))
    seconds = []
    for _ in range(repeats + 1):
        begin = comm.clock()
        run(_ping_pong(peer, comm.size, there, back, first), comm, facts=f"ping-pong({ping}, {pong})")
        seconds.append(comm.clock() - begin)
    return statistics.median(seconds[1:])


def _ping_pong(peer: int, size: int, ping: Payload, pong: Payload, first: bool) -> Schedule[None]:
    if peer < size and first:
        yield Round(sends={peer: ping})
        yield Round(recvs={peer: pong.nbytes})
    elif peer < size:
        yield Round(recvs={peer: ping.nbytes})
        yield Round(sends={peer: pong})
