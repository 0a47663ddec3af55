"""Local SGD and DiLoCo here beside torch's, Accelerate's and torchft's: same model, data and start, 2 gloo ranks.

    hatch run peers:bench local-sgd-peers [--boundaries N] [--output DIR]

Trajectories: the largest difference from ours of any parameter after any boundary, in units of the largest parameter.
Seconds and bytes of a boundary: what a step with one takes, and both ranks put on the wire (loopback of a network
namespace, headers included), more than one without; medians of rank 0. Peers that are not installed are left out.
"""

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from local_sgd import DiLoCo, LocalSGD
from torch import Tensor, nn

from bench.real_ranks import found_by, tell, unhindered
from bench.record import asked, parser_of, record
from bench.torchft_manager import manager_of

RANKS, EVERY, WIDTH, LAYERS = 2, 4, 256, 8
COLUMNS = ("algorithm", "library", "difference", "boundary", "bytes", "step")
APART = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')
"""A network of its own, whose loopback carries nothing but the ranks' bytes."""


@dataclass
class Task:
    """The same model on all ranks, and batches of this rank."""

    model: nn.Module
    inner: torch.optim.Optimizer
    generator: torch.Generator

    @classmethod
    def of(cls, rank: int) -> Self:
        """As at the beginning of every run."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return cls(model, inner, torch.Generator().manual_seed(rank + 1))

    def loss(self, model: nn.Module) -> Tensor:
        """Of a new batch."""
        x = torch.randn(32, WIDTH, generator=self.generator)
        loss: Tensor = (model(x) - x.flip(1)).square().mean()
        return loss

    def backward(self) -> None:
        """Of the loss of a new batch."""
        self.loss(self.model).backward()  # type: ignore[no-untyped-call]

    def parameters(self) -> Tensor:
        """All of them, flat."""
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


Step = Callable[[], None]
Way = Callable[[Task, ExitStack], Step]


def ours(make: Callable[[torch.optim.Optimizer], Any]) -> Way:
    """One of this project's optimizers."""

    def way(task: Task, exits: ExitStack) -> Step:
        optimizer = make(task.inner)
        exits.callback(optimizer.drain)

        def step() -> None:
            optimizer.zero_grad()
            task.backward()
            optimizer.step()
            optimizer.average()

        return step

    return way


def post_local_sgd(task: Task, exits: ExitStack) -> Step:
    """torch's; it averages after the first step, and then after every EVERY."""
    del exits
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(optim=task.inner, averager=averager)

    def step() -> None:
        optimizer.zero_grad()
        task.backward()
        optimizer.step()  # type: ignore[no-untyped-call]

    return step


def accelerate_local_sgd(task: Task, exits: ExitStack) -> Step:
    """Accelerate's, inside DistributedDataParallel without its allreduce."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD as Theirs

    accelerator = Accelerator(cpu=True)
    model, inner = accelerator.prepare(task.model, task.inner)
    local = exits.enter_context(Theirs(accelerator=accelerator, model=model, local_sgd_steps=EVERY))

    def step() -> None:
        inner.zero_grad()
        accelerator.backward(task.loss(model))
        inner.step()
        local.step()

    return step


def torchft(make: Callable[[Any, Task], Any]) -> Way:
    """torchft's, with its manager, and its lighthouse on rank 0."""

    def way(task: Task, exits: ExitStack) -> Step:
        exits.enter_context(make(exits.enter_context(manager_of(task.model)), task))

        def step() -> None:
            task.inner.zero_grad()
            task.backward()
            task.inner.step()

        return step

    return way


def _torchft_local_sgd(manager: Any, task: Task) -> Any:
    from torchft.local_sgd import LocalSGD as Theirs

    return Theirs(manager, task.model, task.inner, sync_every=EVERY)


def _torchft_diloco(manager: Any, task: Task) -> Any:
    from torchft.local_sgd import DiLoCo as Theirs

    outer = torch.optim.SGD(task.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return Theirs(manager, [task.model], task.inner, outer, sync_every=EVERY)


# algorithm, library, how, the package that it needs; ours, which the others are compared with, stands before them
WAYS: list[tuple[str, str, Way, str]] = [
    ("LocalSGD", "thinwire", ours(lambda inner: LocalSGD(inner, sync_every=EVERY)), "local_sgd"),
    ("LocalSGD", "accelerate", accelerate_local_sgd, "accelerate"),
    ("LocalSGD", "torchft", torchft(_torchft_local_sgd), "torchft"),
    (
        "LocalSGD, first block of 1",
        "thinwire",
        ours(lambda inner: LocalSGD(inner, sync_every=lambda step: EVERY if step else 1)),
        "local_sgd",
    ),
    ("LocalSGD, first block of 1", "torch", post_local_sgd, "torch"),
    ("DiLoCo", "thinwire", ours(lambda inner: DiLoCo(inner, sync_every=EVERY)), "local_sgd"),
    ("DiLoCo", "torchft", torchft(_torchft_diloco), "torchft"),
]

AGAINST = "torch's, Accelerate's and torchft's"


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the table; returns the exit status."""
    parser = parser_of("local-sgd-peers", __doc__, full="four times as many")
    parser.add_argument("--boundaries", type=int, help="default 12, with --full 48")
    options = asked(parser, argv, boundaries=(12, 48))
    missing = sorted({needs for *_, needs in WAYS if importlib.util.find_spec(needs) is None})
    if missing:
        print(f"left out, because not installed: {', '.join(missing)} (hatch run peers:bench local-sgd-peers has them)")
    apart = os.geteuid() == 0 and shutil.which("unshare") is not None and shutil.which("ip") is not None
    if not apart:
        print("no network namespace here (it takes root, unshare and ip): bytes are the whole machine's")
    print(f"P = {RANKS}, {LAYERS * (WIDTH + 1) * WIDTH:,} parameters, a boundary every {EVERY} steps", flush=True)
    command = [sys.executable, "-c", f"import bench.local_sgd_peers as it; it.alone({options.boundaries})"]
    done = subprocess.run([*(APART if apart else []), *command], capture_output=True, text=True)
    if done.returncode:  # what a manager writes when all is well is of no use here
        print(done.stderr, file=sys.stderr)
        return done.returncode
    rows = json.loads(done.stdout.splitlines()[-1])
    record(options, rows, labels=COLUMNS[:2], values=("boundary", "step"), against=AGAINST, shown=COLUMNS)
    return 0


def alone(boundaries: int) -> None:
    """Starts both ranks in this process's network; prints the rows as its last line."""
    with unhindered(RANKS) as ranks:
        print(json.dumps(found_by(ranks, on_rank, boundaries, mpi=False)))


def on_rank(boundaries: int) -> None:
    """One rank's part, in a process group; rank 0 tells each row."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # by which Accelerate knows that there are others
    reference: dict[str, list[Tensor]] = {}
    for algorithm, library, way, needs in WAYS:
        if importlib.util.find_spec(needs) is None:
            continue
        task = Task.of(dist.get_rank())
        with ExitStack() as exits:
            step = way(task, exits)
            first = 1 if algorithm.endswith("of 1") else EVERY
            path, found = _measured(task, step, first, boundaries)
        ours_path = reference.setdefault(algorithm, path)
        largest = max(float(x.abs().max()) for x in ours_path)
        found["difference"] = max(float((a - b).abs().max()) for a, b in zip(path, ours_path, strict=True)) / largest
        if dist.get_rank() == 0:
            tell({"algorithm": algorithm, "library": library, **found})


def _measured(task: Task, step: Step, first: int, boundaries: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters after every boundary; medians, and what they are of."""
    path: list[Tensor] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    nbytes: dict[bool, list[int]] = {True: [], False: []}
    for count in range(first + EVERY * boundaries):
        boundary = count + 1 >= first and (count + 1 - first) % EVERY == 0
        dist.barrier()
        sent, began = _loopback_bytes(), time.perf_counter()
        step()
        seconds[boundary].append(time.perf_counter() - began)
        dist.barrier()
        nbytes[boundary].append(_loopback_bytes() - sent)
        if boundary:
            path.append(task.parameters())
    step_seconds = statistics.median(seconds[False])
    return path, {
        "boundary": statistics.median(seconds[True][1:]) - step_seconds,
        "bytes": statistics.median(nbytes[True][1:]) - statistics.median(nbytes[False]),
        "step": step_seconds,
        "step_samples": seconds[False],
        "with_boundary_samples": seconds[True][1:],
    }


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0
