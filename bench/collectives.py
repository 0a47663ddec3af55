"""Every sparse allreduce next to mpi4py's and gloo's dense one, on real ranks over this machine's shared memory.

    python -m bench collectives [--full] [--repeats N] [--output DIR]

select: error feedback and selection. prepare: checks, facts, and a copy that is the call's own. merge: what the
schedule computes between its rounds. exchange: the rest of the call, which all ranks enter at once, after a barrier
that is not counted. restore: what was dropped into the residual. put: the mean into the gradient's own memory, as in
training; before each call, dense or sparse, that memory is written anew, as a backward does. x_mpi, x_gloo: the whole
call in units of the dense allreduce of the same n. x_link: exchange and merge in units of α·rounds + β·bytes as
measured in the same launch. sent and rounds: next to the algorithm's expression. Medians of interleaved repeats on
rank 0; x_mpi_least: the shortest call in units of MPI's shortest.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from communicators import Communicator, Link, allreduce, as_communicator
from sparse_collectives import ALGORITHMS
from sparse_collectives.prediction import measure_traffic
from sparse_compress import TopK

from bench.collectives_calls import Times, Training, counted, medians_of, sparse, whole
from bench.real_ranks import found_by, process_group, tell, unhindered
from bench.record import asked, parser_of, record
from bench.turns import in_turns

QUICK = ((2, 10**6, 0.01), (2, 10**6, 0.001), (2, 25 * 10**6, 0.01), (4, 10**6, 0.01))
FULL = tuple((size, n, density) for size in (2, 4) for n in (10**6, 25 * 10**6) for density in (0.01, 0.001))

PARTS = ("select", "prepare", "merge", "exchange", "restore", "put")
LABELS = ("algorithm", "P", "n", "density")
RATIOS, COUNTS = ("x_mpi", "x_mpi_least", "x_gloo", "x_link"), ("sent", "expected_sent", "rounds", "expected_rounds")
BF16 = "dense in bf16"
AGAINST = "mpi4py's Allreduce and gloo's all_reduce of the same n, and α·rounds + β·bytes of the same link"


def main(argv: Sequence[str] = ()) -> None:
    """Starts the ranks, prints the table."""
    parser = parser_of("collectives", __doc__, full="every size, density and number of ranks: minutes")
    parser.add_argument("--repeats", type=int, default=7, help="default 7")
    options = asked(parser, argv)
    cases = FULL if options.full else QUICK
    rows: list[dict[str, Any]] = []
    for size in sorted({size for size, _, _ in cases}):
        mine = [(n, density) for ranks, n, density in cases if ranks == size]
        with unhindered(size) as ranks:
            rows += found_by(ranks, on_rank, options.repeats, mine, mpi=True, timeout=1800)
    shown = (*LABELS, *(f"{part}_ms" for part in (*PARTS, "whole")), *RATIOS, *COUNTS)
    record(options, rows, labels=LABELS, values=("x_mpi",), against=AGAINST, shown=shown)


def on_rank(repeats: int, cases: Sequence[tuple[int, float]]) -> None:
    """One rank's part, under mpiexec; rank 0 tells the rows."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with _gloo_of(world):
        comm = as_communicator(world)
        link = measure_traffic(comm)
        for numel, density in cases:
            for row in _measure(comm, world, numel, density, repeats, link):
                if comm.rank == 0:
                    tell({"P": comm.size, "n": numel, "density": density, **row})


def _measure(
    comm: Communicator, world: Any, numel: int, density: float, repeats: int, link: Link
) -> list[dict[str, Any]]:
    from mpi4py import MPI

    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    own = gradient.clone()  # what a call takes, and where its result goes
    calls: dict[str, Callable[[], Times]] = {
        "mpi4py Allreduce": whole(lambda: world.Allreduce(MPI.IN_PLACE, own.numpy())),
        "gloo all_reduce": whole(lambda: dist.all_reduce(own)),
    }
    calls[BF16] = counted(comm, lambda: allreduce(gradient.bfloat16(), comm, native=False).float())
    for name, entry in ALGORITHMS.items():
        if entry.selects:
            calls[name] = partial(sparse, Training(comm, name, entry, TopK(density), world.Barrier), own)
        else:
            calls[name] = counted(comm, partial(allreduce, gradient, comm, native=False))
    taken = in_turns(calls, repeats, before=lambda: (world.Barrier(), own.copy_(gradient)))
    medians = {name: medians_of(times) for name, times in taken.items()}
    whole_ms = {name: [1e3 * one["whole"] for one in times] for name, times in taken.items()}
    return [_row(name, medians, whole_ms, comm, numel, TopK(density).entries(numel), link) for name in calls]


def _row(
    name: str,
    medians: dict[str, Times],
    whole_ms: dict[str, list[float]],
    comm: Communicator,
    numel: int,
    k: int,
    link: Link,
) -> dict[str, Any]:
    """What is known of one call, by column; all that is measured is rank 0's.

    medians, whole_ms: of the case's calls, by name; whole_ms of every repeat.
    """
    mine, dense = medians[name], "mpi4py Allreduce"
    found: dict[str, Any] = {"algorithm": name, "whole_ms": 1e3 * mine["whole"], "whole_ms_samples": whole_ms[name]}
    found |= {f"{part}_ms": 1e3 * mine[part] if part in mine else None for part in PARTS}
    found["x_mpi"] = mine["whole"] / medians[dense]["whole"]
    found["x_mpi_least"] = min(whole_ms[name]) / min(whole_ms[dense])
    found["x_gloo"] = mine["whole"] / medians["gloo all_reduce"]["whole"]
    found |= dict.fromkeys(("x_link", *COUNTS))
    algorithm, dtype = ("dense", torch.bfloat16) if name == BF16 else (name, torch.float32)
    if algorithm in ALGORITHMS:
        expression = ALGORITHMS[algorithm].typical
        expected = expression(comm.rank, comm.size, k, numel, dtype)
        model = link.seconds(expected.nbytes, expected.rounds)
        found["x_link"] = (mine["exchange"] + mine.get("merge", 0.0)) / model
        found |= {"sent": int(mine["sent"]), "expected_sent": expected.nbytes}
        found |= {"rounds": int(mine["rounds"]), "expected_rounds": expected.rounds}
    return found


def _gloo_of(world: Any) -> AbstractContextManager[None]:
    """A group of the MPI ranks."""
    port = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    port = world.bcast(port)
    return process_group(f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size)
