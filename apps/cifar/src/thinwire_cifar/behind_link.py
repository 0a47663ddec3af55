"""A few of the demo's steps behind an emulated slow link, where this machine can emulate one: see `slow_link`."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from thinwire_trainer.launching.workers import find_mpiexec, worker_environment

RATE_MBIT, DELAY_MS = 100, 1
LONGEST = 30  # seconds that it may take, torch's start included; on an idle machine it is a third
TURNS, STEPS = 3, 2  # of each algorithm, which take turns; the first one warms up


def measured(ranks: int) -> Mapping[str, Mapping[str, float]] | str:
    """By algorithm: seconds of a step, "measured" and "predicted"; or why there is nothing."""
    if importlib.util.find_spec("slow_link") is None:
        return "`slow_link`, which emulates one, is not installed: pip install thinwire-cifar[link]"
    link = ["--rate", f"{RATE_MBIT}mbit", "--delay", f"{DELAY_MS}ms", "--timeout", str(LONGEST)]
    ranks_of = [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "thinwire_cifar.behind_link"]
    command = [sys.executable, "-m", "slow_link", *link, "--", *ranks_of]
    done = subprocess.run(
        command, env=worker_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
        return f"{said[-1].removeprefix('slow_link: ')} (status {done.returncode})"
    result: dict[str, dict[str, float]] = json.loads(found[-1])
    return result


def shown(found: Mapping[str, Mapping[str, float]] | str) -> str:
    """A line for each algorithm, or the reason for none."""
    heading = f"behind {RATE_MBIT} Mbit/s and {DELAY_MS} ms"
    if isinstance(found, str):
        return f"Not measured {heading}: {found}"
    lines = [f"A step, measured {heading}, and predicted for it:"]
    lines += [
        f"  {name:10} measured {1e3 * row['measured']:6.1f} ms   predicted {1e3 * row['predicted']:6.1f} ms"
        for name, row in found.items()
    ]
    (_, dense), (name, sparse) = found.items()
    times = dense["measured"] / sparse["measured"]
    lines.append(f"{name} steps are {times:.2f} times as fast there, measured, by real ranks behind an emulated link.")
    return "\n".join(lines)


def on_rank() -> None:
    """One rank's part, under mpiexec behind the link; rank 0 prints a line of JSON."""
    import torch
    from communicators import Link, as_communicator, barrier
    from mpi4py import MPI

    from thinwire_cifar.comparison import ALGORITHMS, DENSITY
    from thinwire_cifar.prediction import exchange_seconds, selection_seconds

    torch.set_num_threads(1)
    comm = as_communicator(MPI.COMM_WORLD)
    trainings = {name: _training(name, own, comm) for name, own in ALGORITHMS.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for turn in range(TURNS + 1):
        for name, (step, _) in trainings.items():
            for _ in range(STEPS):
                barrier(comm)
                seconds = step()
                taken[name] += [seconds] if turn else []
    compute = statistics.median(one[0] for each in taken.values() for one in each)
    numel = trainings["dense"][1]
    selection = selection_seconds(comm, torch.device("cpu"), numel=numel, density=DENSITY)
    link = Link(alpha=1e-3 * DELAY_MS, beta=8e-6 / RATE_MBIT)
    found = {}
    for name, each in taken.items() if comm.rank == 0 else ():
        exchange = exchange_seconds(name, numel=numel, density=DENSITY, size=comm.size, link=link)
        expected = compute + exchange + (0.0 if name == "dense" else selection)
        found[name] = {"measured": statistics.median(one[1] for one in each), "predicted": expected}
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


def _training(algorithm: str, own: list[str], comm: Any) -> tuple[Callable[[], tuple[float, float]], int]:
    """A function that takes a step, and gives its seconds of computing and of the whole; the number of parameters."""
    import torch
    from thinwire_trainer.app import Reads
    from thinwire_trainer.command_line.flags import parse, table_of
    from torch.optim.lr_scheduler import LambdaLR

    from thinwire_cifar.__main__ import APP

    options = parse(["--algorithm", algorithm, *own], APP, world_size=comm.size)
    task = APP.build(options, torch.device("cpu"))
    assert isinstance(task, Reads)
    read, size = task.read_train, task.train_size
    steady = partial(LambdaLR, lr_lambda=lambda step: 1.0)
    synchroniser = table_of(APP)[algorithm].make(options, task.model, comm, steady)
    generator = torch.Generator().manual_seed(comm.rank)

    def step() -> tuple[float, float]:
        batch = read(torch.randint(size, (options.batch_size,), generator=generator), 0)
        began = time.perf_counter()
        synchroniser.zero_grad()
        task.loss(batch, generator).backward()  # type: ignore[no-untyped-call]
        computed = time.perf_counter()
        synchroniser.exchange()
        synchroniser.update()
        synchroniser.average()
        return computed - began, time.perf_counter() - began

    return step, sum(parameter.numel() for parameter in task.model.parameters())


if __name__ == "__main__":
    on_rank()
