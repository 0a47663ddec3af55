"""How much of an exchange backward hides, on two real ranks behind a slow link; and what Python costs a round.

    python -m bench overlap [--mbit RATE] [--ms DELAY] [--repeats N] [--full] [--output DIR]

compute: forward and backward alone. exchange: the same buckets' sparse vectors, ready, exchanged alone. step:
synchronize() and the optimizer's step after backward, without what it waits. overlapped: forward, backward and step
with overlap=True. waits: from when backward is over and every bucket started, to the end of the last one's exchange (by
the optimizer's `stats`), on the rank where it is least: the other one waits for that rank's backward too. hidden:
1 − waits / exchange. contention: what overlapped takes beyond what stays visible of its parts, because selecting,
merging and polling compete with backward for cores. Medians of interleaved repeats, of rank 0 but for waits, ms. batch:
so that backward takes 1.2, or 2.4, times the exchange: what is shorter cannot hide it.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from communicators import Communicator, allgather, as_communicator, barrier, buckets_of
from data_parallel import DistributedOptimizer
from data_parallel.backward_order import BUCKET_BYTES
from slow_link import open_link
from sparse_collectives import sparse_allreduce_async
from sparse_compress import TopK, topk
from torch import nn

from bench.real_ranks import found_by, tell
from bench.record import asked, parser_of, record
from bench.turns import in_turns, seconds_of

MIB = 1 << 20
SHORT, LONG = 1.2, 2.4  # times that backward is as long as the exchange
PROBE = 512  # samples
COLUMNS = (
    *("algorithm", "batch", "bucket_MiB", "compute", "exchange", "step"),
    *("overlapped", "waits", "contention", "hidden"),
)

AGAINST = "the same exchange alone, nothing else to do"


def main(argv: Sequence[str] = ()) -> None:
    """Starts the ranks, prints the table."""
    parser = parser_of("overlap", __doc__, full="more bucket sizes")
    parser.add_argument("--buckets", type=float, nargs="+", metavar="MIB", help="default 1 4 16, with --full 1 to 32")
    parser.add_argument("--mbit", type=float, default=25.0, help="link rate, default 25")
    parser.add_argument("--ms", type=float, default=1.0, help="one-way delay, default 1")
    parser.add_argument("--repeats", type=int, default=9, help="default 9")
    options = asked(parser, argv, buckets=([1, 4, 16], [1, 4, 8, 16, 32]))
    print("P = 2, 9.4 million parameters, density 0.01, MPI")
    with open_link(ranks=2, mbit_per_second=options.mbit, milliseconds=options.ms) as link:
        options.facts["link"] = link.describe()
        rows = found_by(link, on_rank, options.repeats, options.buckets, mpi=True)
    record(options, rows, labels=COLUMNS[:3], values=COLUMNS[-1:], against=AGAINST, shown=COLUMNS)


def on_rank(repeats: int, bucket_mib: Sequence[float]) -> None:
    """One rank's part, under mpiexec."""
    from mpi4py import MPI

    comm = as_communicator(MPI.COMM_WORLD)
    short, long = _batches(comm)
    for algorithm in ("gtopk", "topk-allgather"):
        for batch, size in product((short, long), bucket_mib):
            row = _measure(comm, algorithm, batch, int(size * MIB), repeats)
            if comm.rank == 0:
                print(f"{algorithm}, batch {batch}, {size:g} MiB: {row['hidden']:.1%} hidden", flush=True)
                tell({"algorithm": algorithm, "batch": batch, "bucket_MiB": size, **row})


def _batches(comm: Communicator) -> tuple[int, int]:
    """With which backward is `SHORT` and `LONG` times as long as the exchange, on the rank where it is shortest."""
    work, taken = _Training(comm, "gtopk", PROBE, BUCKET_BYTES), []
    for _ in range(6):
        barrier(comm)
        began = comm.clock()
        work.exchange()
        exchanged = comm.clock()
        work.compute()
        taken.append((work.backward_ended - work.backward_began) / (exchanged - began))
    ratios = allgather(torch.tensor([statistics.median(taken[1:])]), comm)
    ratio = float(torch.cat(ratios).min())
    short, long = (max(1, round(PROBE * times / ratio)) for times in (SHORT, LONG))
    return short, long


def _measure(comm: Communicator, algorithm: str, batch_size: int, bucket_bytes: int, repeats: int) -> dict[str, Any]:
    work = _Training(comm, algorithm, batch_size, bucket_bytes)
    turns = {"compute": work.compute, "exchange": work.exchange, "step": work.step, "overlapped": work.overlapped}

    def timed(turn: Callable[[], None]) -> tuple[float, float]:
        """Milliseconds of a turn, and those of them in which an optimizer waited."""
        waited = work.waited()
        taken = seconds_of(turn, clock=comm.clock)
        return 1e3 * taken, 1e3 * (work.waited() - waited)

    found = in_turns(
        {name: partial(timed, turn) for name, turn in turns.items()}, repeats, before=partial(barrier, comm)
    )
    times = {name: [taken for taken, _ in pairs] for name, pairs in found.items()}
    times["step"] = [taken - waited for taken, waited in found["step"]]  # selection, merges' results, the update
    waits = allgather(torch.tensor([waited for _, waited in found["overlapped"]]), comm)
    times["waits"] = torch.stack(waits).amin(0).tolist()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    worked = statistics.median(taken - waited for taken, waited in found["overlapped"])
    contention = worked - medians["compute"] - medians["step"]
    samples = {f"{name}_samples": taken for name, taken in times.items()}
    return {**medians, "contention": contention, "hidden": 1 - medians["waits"] / medians["exchange"], **samples}


class _Training:
    """One model with two optimizers, and what a rank does with them. backward_began, backward_ended: the last one."""

    def __init__(self, comm: Communicator, algorithm: str, batch_size: int, bucket_bytes: int) -> None:
        torch.manual_seed(comm.rank)
        self._comm, self._algorithm, self._bucket_bytes = comm, algorithm, bucket_bytes
        self._model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(16)))  # 9.4 million parameters
        self._batch = torch.randn(batch_size, 768)
        self._plain, self._overlapping = self._optimizer(overlap=False), self._optimizer(overlap=True)
        buckets = buckets_of(list(self._model.parameters()), bucket_bytes)
        self._ready = [topk(torch.randn(bucket.numel), TopK(0.01).entries(bucket.numel)) for bucket in buckets]
        self.backward_began = self.backward_ended = 0.0

    def _optimizer(self, *, overlap: bool) -> DistributedOptimizer:
        return DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), lr=1e-3),
            self._model.named_parameters(),
            comm=self._comm,
            algorithm=self._algorithm,
            compressor=TopK(0.01),
            bucket_bytes=self._bucket_bytes,
            overlap=overlap,
        )

    def _backward(self) -> None:
        self._model.zero_grad(set_to_none=True)
        loss = self._model(self._batch).square().mean()
        self.backward_began = self._comm.clock()
        loss.backward()
        self.backward_ended = self._comm.clock()

    def waited(self) -> float:
        return sum(optimizer.stats()["seconds_waited"] for optimizer in (self._plain, self._overlapping))

    def compute(self) -> None:
        with self._overlapping.no_sync():
            self._backward()

    def exchange(self) -> None:
        works = [sparse_allreduce_async(v, self._comm, k=len(v), algorithm=self._algorithm) for v in self._ready]
        for work in works:
            work.wait()

    def step(self) -> None:
        self._plain.step()

    def overlapped(self) -> None:
        self._backward()
        self._overlapping.step()
