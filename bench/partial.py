"""What a straggler costs the others, with a plain allreduce and with partial ones.

    python -m bench partial [--full] [--output DIR]

Four real ranks under mpiexec, each computes for 10 ms a step (asleep: ranks share the cores here), then sums 100,000
floats. call: median milliseconds of the call at the ranks that are not delayed. "delayed": the last rank computes for
200 ms more. overhead: of a step of 100 ms and the call against one with a plain allreduce, where nobody is late; ways
take turns, so that what else the machine does meets all of them: median of the turns, and their quartiles.
idle: share of a core that a rank takes while nothing happens, with a partial allreduce open and without.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from communicators import Communicator, allreduce, as_communicator, barrier
from partial_collectives import PartialAllreduce

from bench.real_ranks import found_by, tell, unhindered
from bench.record import asked, parser_of, record

RANKS = 4
NUMEL = 100_000
COMPUTE_SECONDS = 0.01
DELAY_SECONDS = 0.2
IDLE_SECONDS = 3.0
STEP_SECONDS, TURN_STEPS = 0.1, 5
SYNCHRONOUS = "plain allreduce"
QUORUMS: dict[str, Any] = {"solo": "solo", "2 of 4": 2, "majority": "majority", "4 of 4": RANKS}

SHOWN = ("how", "call_ms", "delayed_ms", "overhead", "overhead_low", "overhead_high", "idle_share")
AGAINST = "a plain allreduce by all"


def main(argv: Sequence[str] = ()) -> None:
    """Starts the ranks, prints the table."""
    parser = parser_of("partial", __doc__, full="five times as many")
    parser.add_argument("--steps", type=int, help="of the ranks that are not delayed; default 60, with --full 300")
    options = asked(parser, argv, steps=(60, 300))
    with unhindered(RANKS) as ranks:
        [rows] = found_by(ranks, on_rank, options.steps, mpi=True)
    record(options, rows, labels=SHOWN[:1], values=SHOWN[1:3], against=AGAINST, shown=SHOWN)


def on_rank(steps: int) -> None:
    """One rank's part, under mpiexec; rank 0 tells the rows."""
    from mpi4py import MPI

    comm = as_communicator(MPI.COMM_WORLD)
    rows, overheads = [], _overheads(comm, turns=max(4, steps // 6))
    for how in (SYNCHRONOUS, *QUORUMS):
        alike, delayed = (_measured(comm, how, steps, delay) for delay in (0.0, DELAY_SECONDS))
        low, middle, high = statistics.quantiles(overheads[how], n=4)
        row = {"how": how, "call_ms": statistics.median(alike), "delayed_ms": statistics.median(delayed)}
        row |= {"overhead": middle, "overhead_low": low, "overhead_high": high}
        row |= {"call_ms_samples": alike, "delayed_ms_samples": delayed, "overhead_samples": overheads[how]}
        if comm.rank == 0:
            print(f"{how}: {row['call_ms']:.2f} ms, {row['delayed_ms']:.2f} ms delayed", flush=True)
        rows.append({**row, "idle_share": _idle_share(comm, how)})
    if comm.rank == 0:
        tell(rows)


@contextmanager
def _sums(comm: Communicator, how: str, ours: torch.Tensor, steps: int) -> Iterator[Callable[[], object]]:
    """A call that sums this way; at the end this rank takes part until all have ended. steps: staleness at most."""
    if how == SYNCHRONOUS:
        yield lambda: allreduce(ours, comm, native=False)
        return
    with PartialAllreduce(ours, comm, quorum=QUORUMS[how], max_staleness=steps) as partial:
        yield lambda: partial.allreduce(ours)
        for _ in partial.finish():
            pass


def _measured(comm: Communicator, how: str, steps: int, delay: float) -> list[float]:
    """Milliseconds of every call of this rank."""
    delayed = bool(delay) and comm.rank == comm.size - 1
    shared = steps // 4 if how in (SYNCHRONOUS, "4 of 4") and delay else steps
    alone = max(2, int(steps * COMPUTE_SECONDS / DELAY_SECONDS)) if delayed and shared == steps else shared
    barrier(comm)
    with _sums(comm, how, torch.ones(NUMEL), steps) as call:
        return _timed(call, alone, delay * delayed)


def _overheads(comm: Communicator, turns: int) -> dict[str, list[float]]:
    """For each way, of every turn its step against the plain allreduce's of the same turn, minus 1."""
    ours, steps = torch.ones(NUMEL), dict[str, list[float]]()
    for _ in range(turns):
        for how in (SYNCHRONOUS, *QUORUMS):
            barrier(comm)
            steps.setdefault(how, []).append(1e3 * STEP_SECONDS + _turn(comm, how, ours))
    return {how: [one / plain - 1 for one, plain in zip(steps[how], steps[SYNCHRONOUS], strict=True)] for how in steps}


def _turn(comm: Communicator, how: str, ours: torch.Tensor) -> float:
    """Median milliseconds of the call in a few steps."""
    with _sums(comm, how, ours, 1000) as call:
        return statistics.median(_timed(call, TURN_STEPS, STEP_SECONDS - COMPUTE_SECONDS))


def _timed(call: Callable[[], object], steps: int, delay: float) -> list[float]:
    calls = []
    for _ in range(steps):
        time.sleep(COMPUTE_SECONDS + delay)
        computed = time.perf_counter()
        call()
        calls.append(1e3 * (time.perf_counter() - computed))
    return calls


def _idle_share(comm: Communicator, how: str) -> float:
    """Of a core, of this process, while nothing happens."""
    with _sums(comm, how, torch.ones(1), 1000):
        barrier(comm)
        cpu, begin = time.process_time(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
        barrier(comm)
    return share
