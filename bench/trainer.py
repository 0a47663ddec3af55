"""What the trainer costs a step, against a bare loop of the same model on the same batches.

    python -m bench trainer [--epochs N] [--full] [--output DIR]

One rank trains ResNet-20 with the loop, metrics and checkpoints of `python -m cifar`, and between any two of its steps
a bare loop (loss, backward, torch.optim.SGD) takes one with a model of its own: both meet the same machine. Images are
noise: 32 pixels wide as in CIFAR, and 8 as the digits, whose steps are as short as any.
bare, trainer: ms of CPU time in the median, which other programs change little; overhead: the median over pairs of
neighbours of what the trainer's step takes more, and as a share of a bare step. The first step of an epoch, with
the evaluation before it, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cifar.__main__ import APP
from communicators import as_communicator
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trainer.app import Task
from trainer.command_line.flags import parse
from trainer.command_line.options import Options
from trainer.launching.device import own_device
from trainer.run import run

from bench.record import machine, record

ALGORITHMS = {"dense": [], "local-sgd": [], "gtopk": ["--density", "0.01"]}
PIXELS = (32, 8)
SKIPPED = 5  # pairs, while both warm up


@dataclass
class Interleaved:
    """The app's task, which times the steps of whoever trains it, and takes a bare step at the end of each."""

    task: Task
    bare: Task
    optimizer: SGD
    mark: float | None = None
    pairs: list[tuple[float, float]] = field(default_factory=list)  # seconds: the trainer's step, a bare one

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def train_size(self) -> int:
        return self.task.train_size

    @property
    def test_size(self) -> int:
        return self.task.test_size

    def score(self, indices: Tensor) -> Tensor:
        self.mark = None  # what comes next is no step
        return self.task.score(indices)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return self.task.metrics(sums)

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        ended = time.process_time()
        bare = self._bare_step(indices, generator)
        if self.mark is not None:
            self.pairs.append((ended - self.mark, bare))
        self.mark = time.process_time()
        return self.task.loss(indices, generator)

    def _bare_step(self, indices: Tensor, generator: Generator) -> float:
        began = time.process_time()
        self.optimizer.zero_grad()
        self.bare.loss(indices, generator).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return time.process_time() - began


@dataclass
class Noise:
    """Images of one channel that are learnt by heart; a `trainer.app.Task`. Those of a step are ready."""

    model: nn.Module
    pixels: Tensor
    train_size: int = 1437
    test_size: int = 64

    def loss(self, indices: Tensor, generator: Generator) -> Tensor:
        """See `Task.loss`."""
        del generator
        chosen = indices % len(self.pixels)
        return cross_entropy(self.model(self.pixels[chosen]), chosen % 10)

    def score(self, indices: Tensor) -> Tensor:
        """See `Task.score`: nothing is of interest."""
        return torch.zeros(1, dtype=torch.float64) * len(indices)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """See `Task.metrics`."""
        return {"test_loss": float(sums)}


def measured(algorithm: str, own: Sequence[str], epochs: int, pixels: int) -> list[tuple[float, float]]:
    """Seconds of the trainer's steps, each with that of a bare one beside it."""
    made: list[Interleaved] = []

    def build(options: Options, device: torch.device) -> Interleaved:
        noise = torch.rand(256, 1, pixels, pixels, generator=torch.Generator().manual_seed(0))
        bare, task = (Noise(APP.build(options, device).model, noise) for _ in range(2))
        optimizer = SGD(bare.model.parameters(), lr=options.lr, momentum=options.momentum)
        made.append(Interleaved(task, bare, optimizer))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--algorithm", algorithm, *own, "--max-epochs", str(epochs), "--output", str(Path(folder) / "run")]
        run(replace(APP, build=build), parse(argv, APP, world_size=None), as_communicator(None), device=own_device(0))
    return made[0].pairs[SKIPPED:]


def row_of(algorithm: str, pixels: int, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The figures of one algorithm."""
    trainer, bare = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    more = statistics.median(one - other for one, other in pairs)
    return {
        "algorithm": algorithm,
        "pixels": pixels,
        "pairs": len(pairs),
        "bare_ms": round(1e3 * bare, 3),
        "trainer_ms": round(1e3 * trainer, 3),
        "overhead_us": round(1e6 * more, 1),
        "overhead_percent": round(100 * more / bare, 2),
    }


def main(argv: Sequence[str] = ()) -> int:
    """Prints a line for each algorithm; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench trainer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="of 45 steps; default 2")
    parser.add_argument("--full", action="store_true", help="five times as many")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/trainer.csv, .json and .png too")
    options, facts = parser.parse_args(argv), machine()
    epochs = options.epochs * (5 if options.full else 1)
    rows = [
        row_of(algorithm, pixels, measured(algorithm, own, epochs, pixels))
        for algorithm, own in ALGORITHMS.items()
        for pixels in PIXELS
    ]
    for row in rows:
        print(
            f"{row['algorithm']:>10}, {row['pixels']:>2} pixels wide: bare {row['bare_ms']:.2f} ms, "
            f"trainer {row['trainer_ms']:.2f} ms a step: "
            f"{row['overhead_us']:.0f} µs more, {row['overhead_percent']:.1f} % ({row['pairs']} pairs)"
        )
    if options.output:
        values = ("bare_ms", "trainer_ms")
        record(options.output, "trainer", rows, labels=("algorithm", "pixels"), values=values, facts=facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
