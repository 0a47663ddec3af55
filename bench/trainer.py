"""What the trainer costs a step, against a bare loop of the same model on the same batches.

    python -m bench trainer [--epochs N] [--full] [--output DIR]

One rank trains ResNet-20 with the loop, metrics and checkpoints of `python -m cifar`, and between any two of its steps
bare loops take one each, with models of their own: all meet the same machine. Images are noise, and lie ready, so that
nobody reads or augments any: 32 pixels wide as in CIFAR, and 8 as the digits, whose steps are as short as any. Memory
that is freed stays with the process.
bare: loss, backward and torch.optim.SGD; same: loss, backward and the optimizer that the algorithm takes, at one rank;
trainer: ms of CPU time in the median, which other programs change little. loop: the median over neighbours of what the
trainer's step takes more than same, in per cent of bare: what the loop adds, to be below 3. overhead: the same of what
it takes more than bare, in which the algorithm's own work is, too: gathering gradients, selecting, looking for NaN. The
first step of an epoch, with the evaluation before it, is left out.
"""

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from communicators import as_communicator
from thinwire_cifar.__main__ import APP
from thinwire_trainer.app import Task
from thinwire_trainer.command_line.flags import parse, table_of
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.launching.device import own_device
from thinwire_trainer.run import run
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from bench.record import asked, parser_of, record
from bench.turns import seconds_of

ALGORITHMS = {"dense": [], "local-sgd": [], "gtopk": ["--density", "0.01"]}
PIXELS = (32, 8)
SKIPPED = 5  # steps, while all warm up
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
BareStep: TypeAlias = Callable[[Tensor, Generator], None]
"""Takes a step on these samples."""


@dataclass
class Noise:
    """Images of one channel that are learnt by heart; a `thinwire_trainer.app.Task`. Those of a step are ready."""

    model: nn.Module
    pixels: Tensor
    train_size: int = 1437
    test_size: int = 64

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        """Mean cross entropy (`Task.loss`)."""
        del generator
        chosen = indices % len(self.pixels)
        return cross_entropy(self.model(self.pixels[chosen]), chosen % 10)

    def score(self, indices: Tensor) -> Tensor:
        """Nothing of interest (`Task.score`)."""
        return torch.zeros(1, dtype=torch.float64) * len(indices)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Nothing of interest (`Task.metrics`)."""
        return {"test_loss": float(sums)}


@dataclass
class Interleaved(Noise):
    """Times the steps of whoever trains it, and takes a bare step at the end of each."""

    bare: Sequence[BareStep] = ()
    mark: float | None = None
    steps: list[tuple[float, ...]] = field(default_factory=list)  # seconds: the trainer's step, the bare ones

    def score(self, indices: Tensor) -> Tensor:
        """Nothing of interest (`Task.score`)."""
        self.mark = None  # what comes next is no step
        return super().score(indices)

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        """Mean cross entropy (`Task.loss`), the first thing of the trainer's step."""
        ended = time.process_time()
        seconds = [seconds_of(partial(bare, indices, generator), clock=time.process_time) for bare in self.bare]
        if self.mark is not None:
            self.steps.append((ended - self.mark, *seconds))
        self.mark = time.process_time()
        return super().loss(indices, generator)


def plain(task: Task, options: Options) -> BareStep:
    """A step of torch alone."""
    optimizer = SGD(task.model.parameters(), lr=options.lr, momentum=options.momentum)

    def step(indices: Tensor, generator: Generator) -> None:
        optimizer.zero_grad()
        task.loss(indices, generator).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def same(task: Task, options: Options) -> BareStep:
    """A step with the algorithm's own optimizer, at a constant rate."""
    make = table_of(APP)[options.algorithm].make
    steady = partial(LambdaLR, lr_lambda=lambda step: 1.0)
    synchroniser = make(options, task.model, as_communicator(None), steady)

    def step(indices: Tensor, generator: Generator) -> None:
        synchroniser.zero_grad()
        task.loss(indices, generator).backward()  # type: ignore[no-untyped-call]
        synchroniser.exchange()
        synchroniser.update()
        synchroniser.average()

    return step


def keep_freed_memory() -> None:
    """Not for the system to take back, where the C library can be told: glibc gives it back at one step's end, and the
    next pays for having it anew, thousands of page faults; of three loops by turns it was always the same one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def measured(algorithm: str, own: Sequence[str], epochs: int, pixels: int) -> list[tuple[float, ...]]:
    """Seconds of the trainer's steps, each with those of the bare ones beside it."""
    made: list[Interleaved] = []

    def build(options: Options, device: torch.device) -> Interleaved:
        noise = torch.rand(256, 1, pixels, pixels, generator=torch.Generator().manual_seed(0))
        model, *others = (APP.build(options, device).model for _ in range(3))
        bare = [make(Noise(other, noise), options) for make, other in zip((plain, same), others, strict=True)]
        made.append(Interleaved(model, noise, bare=bare))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--algorithm", algorithm, *own, "--max-epochs", str(epochs), "--output", str(Path(folder) / "run")]
        run(replace(APP, build=build), parse(argv, APP, world_size=None), as_communicator(None), device=own_device(0))
    return made[0].steps[SKIPPED:]


def row_of(algorithm: str, pixels: int, steps: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """The figures of one algorithm."""
    columns = dict(zip(("trainer", "bare", "same"), zip(*steps, strict=True), strict=True))
    medians = {name: statistics.median(seconds) for name, seconds in columns.items()}
    loop, more = (statistics.median(step[0] - step[other] for step in steps) / medians["bare"] for other in (2, 1))
    row: dict[str, Any] = {"algorithm": algorithm, "pixels": pixels, "steps": len(steps)}
    row |= {f"{name}_ms": round(1e3 * medians[name], 3) for name in ("bare", "same", "trainer")}
    row |= {"loop_percent": round(100 * loop, 2), "overhead_percent": round(100 * more, 2)}
    return row | {f"{name}_ms_samples": [round(1e3 * one, 3) for one in columns[name]] for name in columns}


AGAINST = "the same steps as a bare loop"


def main(argv: Sequence[str] = ()) -> None:
    """Prints a line for each algorithm."""
    parser = parser_of("trainer", __doc__, full="five times as many")
    parser.add_argument("--epochs", type=int, help="of 45 steps; default 2, with --full 10")
    options = asked(parser, argv, epochs=(2, 10))
    keep_freed_memory()
    rows = (
        row_of(algorithm, pixels, measured(algorithm, own, options.epochs, pixels))
        for algorithm, own in ALGORITHMS.items()
        for pixels in PIXELS
    )
    labels, values = ("algorithm", "pixels"), ("bare_ms", "same_ms", "trainer_ms")
    shown = (*labels, *values, "loop_percent", "overhead_percent", "steps")
    record(options, rows, labels=labels, values=values, against=AGAINST, shown=shown)
