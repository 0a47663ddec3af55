"""Process in which one rank meets all others for `thinwire doctor`, which ends it where it hangs or aborts.

    python -m thinwire.doctor.meeting END      # END: of time.monotonic(), until which it waits for others

Prints JSON objects, one a line, as far as it comes: {"ranks": [facts of each]}, {"pairs": true} once every pair has
exchanged, {"alpha": s, "beta": s}; where it fails {"error": reason}.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from communicators import Payload, Round, Schedule, as_communicator, measure_link, run
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from thinwire.doctor.facts import Facts, facts, launched, library_name
from thinwire.doctor.ranks import LATE

FIRST_BYTES = 1 << 16
"""Size of the first large message that measures the link: a second's worth at 0.5 Mbit/s."""
POLL_SECONDS = 0.05
FACTS_BYTES = 1 << 14
"""Bytes in which a rank of MPI tells its facts."""

Left = Callable[[], float]


def meet(mine: Facts, left: Left, say: Callable[..., None]) -> None:
    """Meets the others, over gloo where torch's variables tell of ranks, else by MPI; says how far it came."""
    here = launched(os.environ)
    if here and here.by_torch:
        by_torch(mine, left, say)
    else:
        by_mpi(mine, say)
    comm = as_communicator(None, timeout=left())
    run(to_everybody(comm.rank, comm.size), comm, facts="thinwire doctor")
    say(pairs=True)
    link = measure_link(comm, nbytes=FIRST_BYTES)
    say(alpha=link.alpha, beta=link.beta)


def by_torch(mine: Facts, left: Left, say: Callable[..., None]) -> None:
    """Meets in the Store of $MASTER_ADDR, then by gloo."""
    if left() <= 0:
        raise TimeoutError(LATE)
    store: Store
    rank: int
    size: int
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=left())))
    keys = [f"doctor/{peer}" for peer in range(size)]
    store.set(keys[rank], json.dumps(mine))
    while absent := [peer for peer in range(size) if not store.check([keys[peer]])]:
        if left() <= 0:
            raise TimeoutError(f"rank {rank} met no ranks {absent} there")
        time.sleep(POLL_SECONDS)
    say(ranks=[json.loads(store.get(key)) for key in keys])
    own, patience = PrefixStore("doctor", store), timedelta(seconds=max(left(), 1.0))
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=patience)


def by_mpi(mine: Facts, say: Callable[..., None]) -> None:
    """Meets in COMM_WORLD."""
    from mpi4py import MPI

    said = bytearray(json.dumps(mine).encode().ljust(FACTS_BYTES))[:FACTS_BYTES]  # cut it is an error on all ranks
    gathered = bytearray(FACTS_BYTES * MPI.COMM_WORLD.size)
    MPI.COMM_WORLD.Allgather(said, gathered)  # not allgather(mine), which unpickles what others send
    ranks = [json.loads(gathered[at : at + FACTS_BYTES]) for at in range(0, len(gathered), FACTS_BYTES)]
    say(ranks=ranks, library=library_name(MPI.Get_library_version()))


def to_everybody(rank: int, size: int) -> Schedule[None]:
    """One number from each rank to each other one, in one round."""
    peers = [peer for peer in range(size) if peer != rank]
    number = Payload.of(torch.tensor([rank], device="cpu"))
    received = yield Round(dict.fromkeys(peers, number), dict.fromkeys(peers, number.nbytes))
    wrong = [peer for peer in peers if received[peer].view(torch.int64).item() != peer]
    if wrong:
        raise RuntimeError(f"rank {rank} received something else than was sent from ranks {wrong}")


def main(end: float) -> int:
    """Meets; returns 0, or ends the process at once with 1: the others would be waited for at a usual exit."""

    def say(**found: Any) -> None:
        print(json.dumps(found), flush=True)

    try:
        meet(facts(), lambda: end - time.monotonic(), say)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}".partition("\n")[0])
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
