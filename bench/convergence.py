"""How well each algorithm learns: the DDP example on real gloo ranks, over several seeds.

    python -m bench convergence [--ranks P] [--seeds N] [--epochs N] [--algorithms NAME ...] [--full] [--output DIR]

mean, least and most: test accuracy in percent over the seeds. behind: points by which the mean is below that of plain
DDP ("none"), with the same seeds. One of the 360 test images is 0.28 points.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from sparse_collectives import ALGORITHMS
from sparse_collectives.prediction.plain_table import table

from bench.record import machine, record

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_digits.py"
PLAIN = "none"
COLUMNS = ("algorithm", "ranks", "epochs", "seeds", "mean", "least", "most", "behind")


def main(argv: Sequence[str] = ()) -> int:
    """Starts the ranks, prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench convergence", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="default 2; with --full 2 and 3")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3")
    parser.add_argument("--epochs", type=int, default=20, help="default 20")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--full", action="store_true", help="the numbers to report")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/convergence.csv, .json and .png too")
    options, facts = parser.parse_args(argv), machine()
    seeds, rows = options.seeds or (3 if options.full else 1), []
    for ranks in [options.ranks] if options.ranks else [2, 3] if options.full else [2]:
        found = _accuracies(ranks, options.epochs, seeds, [PLAIN, *options.algorithms])
        if found is None:
            return 1
        rows += [_row(name, ranks, options.epochs, accuracies, found[PLAIN]) for name, accuracies in found.items()]
    _print(rows)
    if options.output:
        record(options.output, "convergence", rows, labels=COLUMNS[:2], values=("mean",), facts=facts)
    return 0


def _accuracies(ranks: int, epochs: int, seeds: int, algorithms: Sequence[str]) -> dict[str, list[float]] | None:
    """Of each algorithm, one a seed; None if the ranks failed, which they have told."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "bench.convergence"]
    command = [sys.executable, *words, str(epochs), str(seeds), *algorithms]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return None if done.returncode else dict(zip(algorithms, (row["accuracies"] for row in found), strict=True))


def on_rank(epochs: int, seeds: int, algorithms: Sequence[str]) -> None:
    """One rank's part, under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = runpy.run_path(str(EXAMPLE))["train"]
    for name in algorithms:
        accuracies = [train(name, seed, epochs) for seed in range(seeds)]
        if dist.get_rank() == 0:
            print(json.dumps({"accuracies": accuracies}), flush=True)
    dist.destroy_process_group()


def _row(
    name: str, ranks: int, epochs: int, accuracies: list[float], plain: list[float]
) -> dict[str, str | int | float]:
    percent = [100 * accuracy for accuracy in accuracies]
    mean = statistics.mean(percent)
    values = (mean, min(percent), max(percent), 100 * statistics.mean(plain) - mean)
    return dict(zip(COLUMNS, (name, ranks, epochs, len(percent), *values), strict=True))


def _print(rows: Sequence[dict[str, str | int | float]]) -> None:
    print(table(COLUMNS, [[f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]))


if __name__ == "__main__":
    on_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
