"""Measurements of the self-check on every rank: times of ping-pongs and allreduces, printed by rank 0 as JSON.

python -m slow_link.measure mpi|gloo REPEATS
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from communicators import SLOT_BYTES, Communicator, Payload, Round, Schedule, allreduce, run

from slow_link.throttled import Throttled, behind_link

PING_BYTES = (SLOT_BYTES, 1 << 16, 1 << 20)
SHORT_BYTES = 1 << 10
SUM_BYTES = 4 << 20
OURS = "communicators"

Measured: TypeAlias = tuple[str, str, int, list[float]]
"""(who, what, bytes, seconds of every repeat)."""


class Transport(ABC):
    """Bare transport, without our communicator: blocking calls on CPU tensors."""

    name: str

    @abstractmethod
    def send(self, x: torch.Tensor, peer: int) -> None: ...

    @abstractmethod
    def receive(self, x: torch.Tensor, peer: int) -> None: ...

    @abstractmethod
    def allreduce(self, x: torch.Tensor) -> None: ...

    @abstractmethod
    def barrier(self) -> None: ...

    def end(self) -> None:  # noqa: B027, MPI ends by itself
        """Shuts the transport down, once no rank measures any more."""


class MPITransport(Transport):
    """Calls of mpi4py."""

    name = "mpi4py"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE

    def send(self, x: torch.Tensor, peer: int) -> None:
        self._comm.Send(x.numpy(), peer)

    def receive(self, x: torch.Tensor, peer: int) -> None:
        self._comm.Recv(x.numpy(), peer)

    def allreduce(self, x: torch.Tensor) -> None:
        self._comm.Allreduce(self._in_place, x.numpy())

    def barrier(self) -> None:
        self._comm.Barrier()


class GlooTransport(Transport):
    """Calls of torch.distributed over gloo."""

    name = "torch gloo"

    def __init__(self) -> None:
        dist.init_process_group("gloo")

    def send(self, x: torch.Tensor, peer: int) -> None:
        dist.send(x, peer)

    def receive(self, x: torch.Tensor, peer: int) -> None:
        dist.recv(x, peer)

    def allreduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x)

    def barrier(self) -> None:
        dist.barrier()

    def end(self) -> None:
        """Leaves the process group, whose only other holder leaves it when `main` returns.

        No thread of gloo's is then left to free a sum while Python ends, which would end the process by SIGABRT.
        """
        dist.destroy_process_group()


def measurements(transport: Transport, comm: Communicator, repeats: int) -> Iterator[Measured]:
    """Measures ping-pongs of all pairs (2i, 2i + 1) at once, then allreduces: of the bare transport, then of ours."""
    yield from ping_pongs(transport, comm, repeats, PING_BYTES)
    x = torch.ones(SUM_BYTES // 4)
    if not isinstance(comm, Throttled):  # only calls through `comm` are slowed
        yield (
            transport.name,
            "allreduce",
            SUM_BYTES,
            _times(repeats, partial(transport.allreduce, x), transport.barrier),
        )
    ours = partial(allreduce, x, comm, native=False)
    yield OURS, "allreduce", SUM_BYTES, _times(repeats, ours, transport.barrier)


def ping_pongs(
    transport: Transport, comm: Communicator, repeats: int, sizes: Sequence[int] = (SLOT_BYTES,)
) -> Iterator[Measured]:
    """Measures seconds one way, repeating short messages more often, because they take little time.

    Repeats need no barrier: no rank serves before the last ball is back.
    """
    games = [(OURS, partial(_our_ping_pong, comm))]
    if not isinstance(comm, Throttled):
        games.insert(0, (transport.name, partial(_ping_pong, transport, comm)))
    for who, once in games:
        for nbytes in sizes:
            often = repeats if nbytes > SHORT_BYTES else 20 * repeats
            yield who, "ping-pong", nbytes, [seconds / 2 for seconds in _times(often, partial(once, nbytes))]


def _ping_pong(transport: Transport, comm: Communicator, nbytes: int) -> None:
    peer, ball = comm.rank ^ 1, torch.zeros(nbytes, dtype=torch.uint8)
    for serving in (0, 1):
        if comm.rank % 2 == serving:
            transport.send(ball, peer)
        else:
            transport.receive(ball, peer)


def _our_ping_pong(comm: Communicator, nbytes: int) -> None:
    run(_rally(comm.rank, nbytes), comm, facts=f"ping-pong({nbytes})")


def _rally(rank: int, nbytes: int) -> Schedule[None]:
    """Ping-pong as a schedule, a round each way."""
    peer, ball = rank ^ 1, Payload.of(torch.zeros(nbytes - SLOT_BYTES, dtype=torch.uint8))
    for serving in (0, 1):
        yield Round({peer: ball}) if rank % 2 == serving else Round(recvs={peer: ball.nbytes})


def _times(repeats: int, once: Callable[[], object], before: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds of every repeat on this rank, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        begin = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main(kind: str, repeats: int, *, software: bool) -> None:
    """Measures on all ranks (collective); rank 0 prints a line of JSON for each measurement."""
    transport = MPITransport() if kind == "mpi" else GlooTransport()
    comm = behind_link()
    found = (ping_pongs if software else measurements)(transport, comm, repeats)
    for who, what, nbytes, seconds in found:
        if comm.rank == 0:
            print(json.dumps((f"{who}, {kind}" if who == OURS else who, what, nbytes, seconds)), flush=True)
    transport.barrier()
    transport.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), software=sys.argv[3:] == ["software"])
