"""Every sparse allreduce next to mpi4py's and gloo's dense one, on real ranks over this machine's shared memory.

    python -m bench collectives [--full] [--repeats N] [--output DIR]

select: error feedback and selection. merge: what the schedule computes between its rounds. exchange: the rest of the
call, which all ranks enter at once, after a barrier that is not counted. put: the mean into a dense tensor, and what
was dropped into the residual. x_mpi, x_gloo: the whole call in units of the dense allreduce of the same n. x_link:
exchange and merge in units of α·rounds + β·bytes as measured in the same launch. sent and rounds: next to the
algorithm's expression. Medians of interleaved repeats on rank 0.
"""

from __future__ import annotations

import argparse
import csv
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from communicators import Communicator, Link, Round, Schedule, allreduce, as_communicator, run
from communicators.schedule import Received
from sparse_collectives import ALGORITHMS
from sparse_collectives.algorithms import Algorithm
from sparse_collectives.allreduce import prepare
from sparse_collectives.calibration import measure_traffic
from sparse_collectives.table import table
from sparse_compress import ErrorFeedback, TopK

QUICK = ((2, 10**6, 0.01), (2, 10**6, 0.001), (2, 25 * 10**6, 0.01), (4, 10**6, 0.01))
FULL = tuple((size, n, density) for size in (2, 4) for n in (10**6, 25 * 10**6) for density in (0.01, 0.001))
PARTS = ("select", "merge", "exchange", "put")
COLUMNS = (
    *("algorithm", "P", "n", "density"),
    *("select_ms", "merge_ms", "exchange_ms", "put_ms", "whole_ms"),
    *("x_mpi", "x_gloo", "x_link"),
)
COUNTS = ("sent", "expected_sent", "rounds", "expected_rounds")

Times = dict[str, float]


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench collectives", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="every size, density and number of ranks: minutes")
    parser.add_argument("--repeats", type=int, default=7, help="default 7")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/collectives.csv too")
    options = parser.parse_args(argv)
    cases = FULL if options.full else QUICK
    rows: list[dict[str, Any]] = []
    for size in sorted({size for size, _, _ in cases}):
        words = [f"{n}:{density}" for ranks, n, density in cases if ranks == size]
        command = [sys.executable, "-m", "bench.collectives", "ranks", str(options.repeats), *words]
        mpiexec = Path(sys.executable).parent / "mpiexec"
        done = subprocess.run([mpiexec, "-n", str(size), *command], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        rows += [json.loads(line) for line in done.stdout.splitlines()]
    print(table((*COLUMNS, *COUNTS), [[_cell(row[name]) for name in (*COLUMNS, *COUNTS)] for row in rows]))
    if options.output:
        _write(options.output / "collectives.csv", rows)
    return 0


def on_rank(repeats: int, cases: Sequence[tuple[int, float]]) -> None:
    """One rank's part, under mpiexec; rank 0 prints a line of JSON for each row."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    comm = as_communicator(world)
    _join_gloo(world)
    link = measure_traffic(comm)
    for numel, density in cases:
        for row in _measure(comm, world, numel, density, repeats, link):
            if comm.rank == 0:
                print(json.dumps({"P": comm.size, "n": numel, "density": density, **row}), flush=True)
    dist.destroy_process_group()


def _measure(
    comm: Communicator, world: Any, numel: int, density: float, repeats: int, link: Link
) -> list[dict[str, Any]]:
    from mpi4py import MPI

    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    total = gradient.clone()
    calls: dict[str, Callable[[], Times]] = {
        "mpi4py Allreduce": _whole(lambda: world.Allreduce(MPI.IN_PLACE, total.numpy())),
        "gloo all_reduce": _whole(lambda: dist.all_reduce(total)),
    }
    for name, entry in ALGORITHMS.items():
        if entry.compresses:
            calls[name] = partial(_sparse, _Training(comm, name, entry, TopK(density), world.Barrier), gradient)
        else:
            calls[name] = _counted(comm, partial(allreduce, gradient, comm, native=False))
    taken: dict[str, list[Times]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            world.Barrier()
            total.fill_(1.0)
            taken[name].append(call())
    medians = {name: _medians(times[1:]) for name, times in taken.items()}
    return [_row(name, medians, comm, numel, TopK(density).entries(numel), link) for name in calls]


class _Training:
    """What one algorithm keeps between the steps of one tensor."""

    def __init__(
        self, comm: Communicator, name: str, entry: Algorithm, compressor: TopK, wait: Callable[[], object]
    ) -> None:
        self.comm, self.name, self.entry, self.compressor = comm, name, entry, compressor
        self.wait, self.feedback = wait, ErrorFeedback(compressor)
        self.state = None if entry.initial_state is None else entry.initial_state()
        self.mean: torch.Tensor | None = None


def _sparse(training: _Training, gradient: torch.Tensor) -> Times:
    """A whole call, and its parts."""
    comm, entry, state = training.comm, training.entry, training.state
    k, inside = training.compressor.entries(gradient.numel()), [0.0, 0.0]
    training.mean = torch.zeros_like(gradient) if training.mean is None else training.mean
    select = entry.select
    prescribed = None if select is None else (lambda acc: select(acc, comm.rank, comm.size, k, state))
    begin = time.perf_counter()
    sparse = training.feedback.compress("x", gradient, select=prescribed)
    selected = time.perf_counter() - begin
    sent = comm.bytes_sent
    schedule, facts = prepare(sparse, comm, k, training.name, None, state)
    training.wait()
    begin = time.perf_counter()
    reduction = run(_watched(schedule, inside), comm, facts=facts)
    exchanged = time.perf_counter()
    training.feedback.restore("x", reduction.dropped)
    training.mean.zero_()[reduction.total.indices] = reduction.total.values / comm.size
    put = time.perf_counter() - exchanged
    merging, rounds = inside
    return {
        "select": selected,
        "merge": merging,
        "exchange": exchanged - begin - merging,
        "put": put,
        "whole": selected + exchanged - begin + put,
        "sent": comm.bytes_sent - sent,
        "rounds": rounds,
    }


def _watched(schedule: Schedule[Any], inside: list[float]) -> Schedule[Any]:
    """The same schedule; inside gets the seconds spent in it, and its rounds."""
    received: Received | None = None
    while True:
        begin = time.perf_counter()
        try:
            action = next(schedule) if received is None else schedule.send(received)
        except StopIteration as stop:
            return stop.value
        finally:
            inside[0] += time.perf_counter() - begin
        inside[1] += isinstance(action, Round)
        received = yield action


def _whole(call: Callable[[], object]) -> Callable[[], Times]:
    def timed() -> Times:
        begin = time.perf_counter()
        call()
        return {"whole": time.perf_counter() - begin}

    return timed


def _counted(comm: Communicator, call: Callable[[], object]) -> Callable[[], Times]:
    def timed() -> Times:
        sent, messages = comm.bytes_sent, comm.messages_sent
        taken = _whole(call)()
        return {
            **taken,
            "exchange": taken["whole"],
            "sent": comm.bytes_sent - sent,
            "rounds": comm.messages_sent - messages,
        }

    return timed


def _medians(times: Sequence[Times]) -> Times:
    return {name: statistics.median(one[name] for one in times) for name in times[0]}


def _row(name: str, medians: dict[str, Times], comm: Communicator, numel: int, k: int, link: Link) -> dict[str, Any]:
    mine = medians[name]
    row: dict[str, Any] = {"algorithm": name, "whole_ms": 1e3 * mine["whole"]}
    row |= {f"{part}_ms": 1e3 * mine[part] if part in mine else None for part in PARTS}
    row["x_mpi"] = mine["whole"] / medians["mpi4py Allreduce"]["whole"]
    row["x_gloo"] = mine["whole"] / medians["gloo all_reduce"]["whole"]
    row |= dict.fromkeys(("x_link", *COUNTS))
    if name in ALGORITHMS:
        expression = ALGORITHMS[name].typical or ALGORITHMS[name].sent
        expected = expression(comm.rank, comm.size, k, numel, torch.float32)
        model = link.seconds(expected.nbytes, expected.rounds)
        row["x_link"] = (mine["exchange"] + mine.get("merge", 0.0)) / model
        row |= {"sent": int(mine["sent"]), "expected_sent": expected.nbytes}
        row |= {"rounds": int(mine["rounds"]), "expected_rounds": expected.rounds}
    return row


def _join_gloo(world: Any) -> None:
    """A gloo group of the MPI ranks."""
    port = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    port = world.bcast(port)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and value >= 0.01:
        return f"{value:,.2f}"
    return value if isinstance(value, str) else f"{value:,}"


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *COUNTS))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        pairs = (word.split(":") for word in sys.argv[3:])
        on_rank(int(sys.argv[2]), [(int(n), float(density)) for n, density in pairs])
    else:
        raise SystemExit(main(sys.argv[1:]))
