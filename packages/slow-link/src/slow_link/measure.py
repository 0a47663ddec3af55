"""Measurements of the self-check on every rank: times of ping-pongs and allreduces, printed by rank 0 as JSON.

python -m slow_link.measure mpi|gloo REPEATS SHORT_REPEATS
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from communicators import SLOT_BYTES, Communicator, Payload, Round, Schedule, allreduce, run

from slow_link.throttled import Throttled, behind_link

PING_BYTES = (SLOT_BYTES, 1 << 16, 1 << 20)
SHORT_BYTES = 1 << 10
SUM_BYTES = 4 << 20
OURS = "communicators"


class Found(NamedTuple):
    """One measurement; `seconds` has an entry for every repeat."""

    who: str
    what: str
    nbytes: int
    seconds: list[float]


class BareCalls(NamedTuple):
    """Blocking calls of MPI or torch.distributed on CPU tensors, without our schedules. end: once no rank measures."""

    name: str
    send: Callable[[torch.Tensor, int], object]
    receive: Callable[[torch.Tensor, int], object]
    allreduce: Callable[[torch.Tensor], object]
    barrier: Callable[[], object]
    end: Callable[[], object]


def over_mpi() -> BareCalls:
    """Calls of mpi4py; MPI ends by itself."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return BareCalls(
        name="mpi4py",
        send=lambda x, peer: comm.Send(x.numpy(), peer),
        receive=lambda x, peer: comm.Recv(x.numpy(), peer),
        allreduce=lambda x: comm.Allreduce(MPI.IN_PLACE, x.numpy()),
        barrier=comm.Barrier,
        end=lambda: None,
    )


def over_gloo() -> BareCalls:
    """Calls of torch.distributed over gloo. The end leaves the group, whose only other holder is `main`'s communicator.

    No thread of gloo's is then left to free a sum while Python ends, which would end the process by SIGABRT.
    """
    dist.init_process_group("gloo")
    return BareCalls("torch gloo", dist.send, dist.recv, dist.all_reduce, dist.barrier, dist.destroy_process_group)


def measurements(bare: BareCalls, comm: Communicator, repeats: int, short_repeats: int) -> Iterator[Found]:
    """Measures ping-pongs of all pairs (2i, 2i + 1) at once, one way, then allreduces: bare ones, then ours.

    short_repeats: of short messages, which mostly take little time. Ping-pongs need no barrier between them: no
    rank serves before the last ball is back.
    """
    x = torch.ones(SUM_BYTES // 4)
    calls: dict[str, tuple[Callable[[int], object], Callable[[], object]]] = {
        bare.name: (partial(_ping_pong, bare, comm.rank), partial(bare.allreduce, x)),
        OURS: (partial(_our_ping_pong, comm), partial(allreduce, x, comm, native=False)),
    }
    if isinstance(comm, Throttled):  # only calls through `comm` are slowed
        del calls[bare.name]
    for who, (ping_pong, _) in calls.items():
        for nbytes in PING_BYTES:
            often = repeats if nbytes > SHORT_BYTES else short_repeats
            there = [seconds / 2 for seconds in _times(often, partial(ping_pong, nbytes))]
            yield Found(who, "ping-pong", nbytes, there)
    for who, (_, summing) in calls.items():
        yield Found(who, "allreduce", SUM_BYTES, _times(repeats, summing, bare.barrier))


def _ping_pong(bare: BareCalls, rank: int, nbytes: int) -> None:
    peer, ball = rank ^ 1, torch.zeros(nbytes, dtype=torch.uint8)
    for serving in (0, 1):
        if rank % 2 == serving:
            bare.send(ball, peer)
        else:
            bare.receive(ball, peer)


def _our_ping_pong(comm: Communicator, nbytes: int) -> None:
    run(_rally(comm.rank, nbytes), comm, facts=f"ping-pong({nbytes})")


def _rally(rank: int, nbytes: int) -> Schedule[None]:
    """Ping-pong as a schedule, a round each way."""
    peer, ball = rank ^ 1, Payload.of(torch.zeros(nbytes - SLOT_BYTES, dtype=torch.uint8))
    for serving in (0, 1):
        yield Round({peer: ball}) if rank % 2 == serving else Round(recvs={peer: ball.nbytes})


def _times(repeats: int, once: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of every repeat on this rank, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        begin = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main(kind: str, repeats: int, short_repeats: int) -> None:
    """Measures on all ranks (collective); rank 0 prints a line of JSON for each measurement."""
    bare = over_mpi() if kind == "mpi" else over_gloo()
    comm = behind_link()
    for who, what, nbytes, seconds in measurements(bare, comm, repeats, short_repeats):
        if comm.rank == 0:
            print(json.dumps((f"{who}, {kind}" if who == OURS else who, what, nbytes, seconds)), flush=True)
    bare.barrier()
    bare.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], *map(int, sys.argv[2:]))
