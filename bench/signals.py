"""How long a signal takes from `send` to the other rank's `on_signal`, and what listening for signals costs.

    python -m bench signals [--repeats N] [--full] [--output DIR]

Two real ranks on this machine. one way: half of a signal and its answer from `on_signal`, microseconds, with the
engine busy (one after the other at once) and idle (after a pause in which it has gone to its longest naps).
idle: the share of a core that a process takes while nothing happens, with signals and without.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from communicators import Communicator, as_communicator, barrier

from bench.form import asked, parser_of
from bench.real_ranks import process_group
from bench.record import record

PAUSE_SECONDS = 0.05
IDLE_SECONDS = 3.0

AGAINST = "the same ranks without a signal channel"


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the table; returns the exit status."""
    parser = parser_of("signals", __doc__, full="five times as many")
    parser.add_argument("--repeats", type=int, help="default 200, with --full 1,000")
    options, facts = asked(parser, argv, repeats=(200, 1000))
    rows = [json.loads(_launched(world, options.repeats)) for world in ("mpi", "gloo")]
    for row in rows:
        print(
            f"{row['world']:>5}: one way {row['busy_us']:.0f} µs in the median, 90 % within {row['busy_p90_us']:.0f}; "
            f"after a pause {row['idle_us']:.0f} and {row['idle_p90_us']:.0f}; idle process "
            f"{row['idle_share']:.1%} of a core, without signals {row['share_without']:.1%}"
        )
    record(
        options.output, "signals", rows, labels=("world",), values=("busy_us", "idle_us"), facts=facts, against=AGAINST
    )
    return 0


def _launched(world: str, repeats: int) -> str:
    """What rank 0 prints."""
    command = [sys.executable, "-m", "bench.signals", "ranks", world, str(repeats)]
    if world == "mpi":
        mpiexec = Path(sys.executable).parent / "mpiexec"
        command = [str(mpiexec), "-n", "2", *command]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    env = {**os.environ, **place}
    with subprocess.Popen(command, env={**env, "RANK": "1"}) as other:
        done = subprocess.run(
            command, env={**env, "RANK": "0"}, stdout=subprocess.PIPE, text=True, check=True, timeout=300
        )
        other.wait(60)
    return done.stdout


def on_rank(world: str, repeats: int) -> None:
    """One rank's part."""
    if world == "mpi":
        from mpi4py import MPI

        comm = as_communicator(MPI.COMM_WORLD)
    else:
        comm = as_communicator(None)
    without = _idle_share(comm)
    answered = threading.Event()
    signals = comm.signals(lambda source, value: signals.send(0, value) if comm.rank else answered.set())
    share = _idle_share(comm)
    row = {"world": world, "idle_share": share, "share_without": without}
    for name, pause in (("busy", 0.0), ("idle", PAUSE_SECONDS)):
        taken = []
        for value in range(repeats if comm.rank == 0 else 0):
            time.sleep(pause)
            begin = time.perf_counter()
            signals.send(1, value)
            answered.wait(20)
            taken.append(1e6 * (time.perf_counter() - begin) / 2)
            answered.clear()
        barrier(comm)
        if taken:
            row |= {f"{name}_us": statistics.median(taken), f"{name}_p90_us": statistics.quantiles(taken, n=10)[-1]}
            row |= {f"{name}_us_samples": taken}
    if comm.rank == 0:
        print(json.dumps(row), flush=True)
    signals.close()


def _idle_share(comm: Communicator) -> float:
    """CPU seconds a second of this process while it only sleeps."""
    barrier(comm)
    time.sleep(PAUSE_SECONDS)
    begin, used = time.perf_counter(), time.process_time()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - used) / (time.perf_counter() - begin)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        with nullcontext() if sys.argv[2] == "mpi" else process_group():
            on_rank(sys.argv[2], int(sys.argv[3]))
    else:
        raise SystemExit(main(sys.argv[1:]))
