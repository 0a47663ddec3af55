"""Three ways through the tree: which of our files and functions each enters, and how often.

    python -m bench walk [--list] [--only hook|average|cifar|cifar-2] [--full]

hook: one gradient from DDP's hook to the parameter and back, gTop-k on two gloo ranks, a model of one bucket, in a step
amid training: backward, with all that the hook and the background do for it. average: `LocalSGD.average()` at a
boundary, over MPI on two ranks, from the call to its return. cifar: files of the apps from `python -m cifar` to the
first optimizer step; cifar-2: the same with --nworkers 2. Counted on rank 0, on all its threads, by Python's own
profiler. calls: a mean of steps; polling by the background is in it, so that it differs from run to run by some.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import SparseHookState, sparse_hook
from local_sgd import LocalSGD
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.entered import FOUND, Entered
from bench.real_ranks import found_by, tell, unhindered
from bench.record import ROOT, asked, parser_of, record

Calls = dict[tuple[str, str, str], int]
"""By package, file and function, how often it was entered in a step."""
LABELS, COUNTS = ("way", "package"), ("files", "functions", "calls")
WARM = 5  # steps; DDP cuts its buckets anew after the first
SHORT = ("--max-epochs", "1", "--batch-size", "360")
AGAINST = "an earlier walk: what a change adds to the way"


def main(argv: Sequence[str] = ()) -> None:
    """Takes each way, prints the table."""
    parser = parser_of("walk", __doc__, full="20 steps, not one")
    parser.add_argument("--steps", type=int, help="of hook and average, counted; default 1, with --full 20")
    parser.add_argument("--only", choices=WAYS, help="this way alone")
    parser.add_argument("--list", action="store_true", help="every function, with how often it was entered")
    options = asked(parser, argv, steps=(1, 20))
    rows: list[dict[str, Any]] = []
    for way in [options.only] if options.only else WAYS:
        steps = WAYS[way](options.steps)
        rows += [_row(way, package, steps) for package in (*sorted({key[0] for key in steps[0]}), "together")]
        for (_, file, name), count in sorted(Counter(steps[0]).items()) if options.list else ():
            print(f"{way:8} {file} {name} {count}")
    record(options, rows, labels=LABELS, values=COUNTS[2:], against=AGAINST, shown=(*LABELS, *COUNTS))


def _row(way: str, package: str, steps: Sequence[Calls]) -> dict[str, Any]:
    own = [{key: count for key, count in step.items() if package in (key[0], "together")} for step in steps]
    functions = {key for step in own for key in step}
    calls = [sum(step.values()) for step in own]
    values = (way, package, len({file for _, file, _ in functions}), len(functions), statistics.mean(calls))
    return {**dict(zip((*LABELS, *COUNTS), values, strict=True)), "calls_samples": calls}


def _on_ranks(part: Callable[[int], None], steps: int, *, mpi: bool) -> list[Calls]:
    with unhindered(2) as ranks:
        return [_read(step) for step in found_by(ranks, part, steps, mpi=mpi)]


def _read(found: Sequence[Sequence[Any]]) -> Calls:
    return {(package, file, name): count for package, file, name, count in found}


def hook(steps: int) -> None:
    """One rank's part of a gradient's way through DDP's hook, in a process group; rank 0 tells its steps."""
    entered = Entered("packages")  # before the background has its thread
    model = nn.Sequential(nn.Linear(100, 90), nn.ReLU(), nn.Linear(90, 10))  # 10⁴ elements
    ddp = DistributedDataParallel(model)
    state = SparseHookState(density=0.01, algorithm="gtopk", named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, sparse_hook)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(8, 100)
    for step in range(WARM + steps):
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        with entered.counting() as calls:
            loss.backward()
        _tell(calls, step, rank=dist.get_rank())
    sys.setprofile(None)


def average(steps: int) -> None:
    """One rank's part of a mean of models, under mpiexec; rank 0 tells its steps."""
    from mpi4py import MPI

    entered = Entered("packages")
    model = nn.Linear(100, 100)
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.01), sync_every=1)
    for step in range(WARM + steps):
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
        with entered.counting() as calls:
            optimizer.average()
        _tell(calls, step, rank=MPI.COMM_WORLD.rank)
    sys.setprofile(None)


def _tell(calls: Counter[tuple[str, str, str]], step: int, *, rank: int) -> None:
    if rank == 0 and step >= WARM:
        tell([[*key, count] for key, count in calls.items()])


def cifar(workers: int) -> Calls:
    """Functions of apps/ on rank 0 and in the process that starts the workers, until the first optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        # Every Python process of the command runs it, also multiprocessing's and mpiexec's children.
        start = f"import sys; sys.path.append({str(ROOT)!r}); import bench.entered as it; it.until_the_first_step()"
        Path(folder, "sitecustomize.py").write_text(start)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        words = ["-m", "cifar", *SHORT, "--nworkers", str(workers), f"--output={folder}/run"]
        environment = os.environ | {FOUND: folder, "PYTHONPATH": path}
        subprocess.run([sys.executable, *words], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300)
        found = [_read(json.loads(file.read_text())) for file in Path(folder).glob("0-*.json")]
    return dict(sum(map(Counter, found), Counter[tuple[str, str, str]]()))


WAYS: dict[str, Callable[[int], list[Calls]]] = {
    "hook": lambda steps: _on_ranks(hook, steps, mpi=False),
    "average": lambda steps: _on_ranks(average, steps, mpi=True),
    "cifar": lambda steps: [cifar(1)],
    "cifar-2": lambda steps: [cifar(2)],
}
