"""What periodic averaging costs behind a slow link, beside synchronous SGD, on real ranks.

    python -m bench local-sgd [--ranks P] [--mbit RATE] [--ms DELAY] [--share S] [--rounds N] [--output DIR]

The batch is chosen so that synchronous SGD, a dense allreduce after every backward, spends the share S of its time in
communication: 0.35, where the Overlap-Local-SGD paper begins (34.6 %, ICASSP 2020; it ends at 1.5 %). step: seconds a
step, the exchanges at boundaries included. overhead: 1 − computing alone / step. hidden: of the seconds that exchanges
took, those in which nobody waited. Medians over rounds, in each of which all ways run one after another, on rank 0.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from communicators import Communicator, allreduce, barrier
from data_parallel import DistributedOptimizer
from local_sgd import ALGORITHMS, PeriodicAveraging
from slow_link import open_link
from slow_link.throttled import behind_link
from torch import nn

from bench.real_ranks import found_by, tell
from bench.record import asked, parser_of, record
from bench.turns import in_turns, seconds_of

WIDTH, LAYERS, EVERY = 256, 4, 2
WARM, STEPS = EVERY, 4 * EVERY
COLUMNS = ("algorithm", "sync_every", "step", "overhead", "hidden", "bytes_a_step")

AGAINST = "computing alone, and synchronous SGD"


def main(argv: Sequence[str] = ()) -> None:
    """Starts the ranks, prints the table."""
    parser = parser_of("local-sgd", __doc__, full="three times as many rounds")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--mbit", type=float, default=100.0, help="link rate, default 100")
    parser.add_argument("--ms", type=float, default=1.0, help="one-way delay, default 1")
    parser.add_argument("--share", type=float, default=0.35, help="of a synchronous step that is communication")
    parser.add_argument("--rounds", type=int, help="default 7, with --full 21")
    options = asked(parser, argv, rounds=(7, 21))
    with open_link(ranks=options.ranks, mbit_per_second=options.mbit, milliseconds=options.ms) as link:
        options.facts["link"] = link.describe()
        print(f"P = {options.ranks}, {WIDTH * WIDTH * LAYERS:,} parameters, {link.describe()}", flush=True)
        rows = found_by(link, on_rank, options.share, options.rounds, mpi=True)
    record(options, rows, labels=COLUMNS[:1], values=("overhead", "hidden"), against=AGAINST, shown=COLUMNS)


def on_rank(share: float, rounds: int) -> None:
    """One rank's part, under mpiexec."""
    from mpi4py import MPI

    comm = behind_link(MPI.COMM_WORLD)
    batch = _batch(share, comm)
    makers: dict[str, Callable[[Task], Any]] = {
        "computing alone": lambda task: task.inner,
        "synchronous": partial(_synchronous, comm),
        **{name: partial(_periodic, comm, kind) for name, kind in ALGORITHMS.items()},
    }
    ways = {name: partial(_taken, make, comm, batch) for name, make in makers.items()}
    taken = in_turns(ways, rounds, before=partial(barrier, comm))
    taken["synchronous"] = [one | {"hidden": 0.0} for one in taken["synchronous"]]
    alone = statistics.median(one["step"] for one in taken["computing alone"])
    for name, found in taken.items():
        row: dict[str, Any] = {key: statistics.median(one[key] for one in found) for key in found[0]}
        row = {"algorithm": name, "sync_every": EVERY if name in ALGORITHMS else 1, **row}
        row["overhead"] = 1 - alone / row["step"]
        if comm.rank == 0:
            samples = {f"{key}_samples": [one[key] for one in found] for key in ("step", "hidden") if key in found[0]}
            tell({**{column: row.get(column) for column in COLUMNS}, **samples})


class Task:
    """A model, the same on all ranks, and this rank's batch."""

    def __init__(self, rank: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.data = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(rank))

    def backward(self) -> None:
        """New gradients."""
        self.inner.zero_grad()
        self.model(self.data).square().mean().backward()


def _batch(share: float, comm: Communicator) -> int:
    """With which a dense exchange takes the share of a synchronous step; the slowest rank's."""
    gradient = torch.randn(WIDTH * WIDTH * LAYERS)
    exchange = _seconds(lambda: allreduce(gradient, comm, native=False), comm, 5)
    task = Task(comm.rank, 512)
    compute = _seconds(task.backward, comm, 9)
    found = torch.tensor([512 * exchange * (1 - share) / share / compute])
    return int(allreduce(found, comm, average=True, native=False).item())


def _seconds(part: Callable[[], object], comm: Communicator, rounds: int) -> float:
    """Median seconds of a part that all ranks begin at once."""
    return statistics.median(in_turns({"": partial(seconds_of, part)}, rounds, before=partial(barrier, comm))[""])


def _taken(make: Callable[[Task], Any], comm: Communicator, batch: int) -> dict[str, float]:
    """What a few steps take by the optimizer that `make` wraps round the task's own."""
    task = Task(comm.rank, batch)
    optimizer = make(task)

    def step() -> None:
        task.backward()
        optimizer.step()
        if isinstance(optimizer, PeriodicAveraging):
            optimizer.average()

    measured = _measured(step, comm)
    if isinstance(optimizer, PeriodicAveraging):
        measured["hidden"] = optimizer.hidden_fraction or 0.0
        optimizer.drain()
    return measured


def _synchronous(comm: Communicator, task: Task) -> DistributedOptimizer:
    return DistributedOptimizer(task.inner, task.model.named_parameters(), comm=comm, algorithm="dense")


def _periodic(comm: Communicator, kind: Callable[..., PeriodicAveraging], task: Task) -> PeriodicAveraging:
    return kind(task.inner, comm=comm, sync_every=EVERY)


def _measured(step: Callable[[], None], comm: Communicator) -> dict[str, float]:
    for _ in range(WARM):
        step()
    sent, began = comm.bytes_sent, time.perf_counter()
    for _ in range(STEPS):
        step()
    return {"step": (time.perf_counter() - began) / STEPS, "bytes_a_step": (comm.bytes_sent - sent) / STEPS}
