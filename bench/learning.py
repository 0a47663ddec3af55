"""How well every `--algorithm` of the cifar app learns: ResNet-20 on real digits, 4 simulated ranks, several seeds.

    python -m bench learning [--ranks P] [--seeds N] [--epochs N] [--algorithms NAME ...] [--jobs N] [--full]
                             [--output DIR]

mean, least, most: test accuracy in percent of the exported model over the seeds, in the bits that real ranks have.
behind: points by which the mean is below dense's, same seeds; one of the 360 test images is 0.28 points. bytes a step:
of the busiest rank, in the last epoch, evaluations left out.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cifar.__main__ import APP
from communicators import SimulatedWorld
from trainer.command_line.flags import parse
from trainer.records.metrics import read_metrics
from trainer.run import run
from trainer.synchronisers.table import TABLE

from bench.record import machine, record

COLUMNS = ("algorithm", "mean", "least", "most", "behind", "bytes_a_step")


def main(argv: Sequence[str] = ()) -> int:
    """Trains them one after another, prints a row for each; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench learning", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3")
    parser.add_argument("--epochs", type=int, default=20, help="default 20")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", choices=TABLE, default=list(TABLE))
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side; they change no bit")
    parser.add_argument("--full", action="store_true", help="the numbers to report")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/learning.csv, .json, .md and .png too")
    options, facts = parser.parse_args(argv), machine()
    seeds, rows = options.seeds or (3 if options.full else 1), list[dict[str, Any]]()
    print("  ".join(f"{name:>17}" for name in COLUMNS), flush=True)
    names = dict.fromkeys(["dense", *options.algorithms])
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        one = partial(_trained, ranks=options.ranks, epochs=options.epochs)
        runs = {name: [pool.submit(one, name, seed=seed) for seed in range(seeds)] for name in names}
        for name, found in runs.items():
            rows.append(_row(name, [run.result() for run in found], rows[0]["mean"] if rows else None))
            cells = [f"{value:,.1f}" if isinstance(value, float) else str(value) for value in rows[-1].values()]
            print("  ".join(f"{cell:>17}" for cell in cells), flush=True)
    if options.output:
        record(options.output, "learning", rows, labels=COLUMNS[:1], values=("mean",), facts=facts)
        (options.output / "learning.md").write_text(_markdown(rows, seeds))
    return 0


def _markdown(rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """The table for a README; an algorithm more than a point behind is marked, for a reason to be given."""
    lines = [f"| `--algorithm` | accuracy in %, mean of {seeds} seeds | of each | points behind dense | bytes a step |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        marked = f"**{row['behind']:.1f}**" if row["behind"] > 1 else f"{row['behind']:.1f}"
        spread = f"{row['least']:.1f} … {row['most']:.1f}"
        lines.append(f"| `{row['algorithm']}` | {row['mean']:.1f} | {spread} | {marked} | {row['bytes_a_step']:,.0f} |")
    return "\n".join(lines) + "\n"


def _trained(algorithm: str, *, ranks: int, epochs: int, seed: int) -> dict[str, Any]:
    """The last epoch's metrics."""
    silent = redirect_stdout(io.StringIO())  # the table is what is shown
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), silent:
        warnings.simplefilter("ignore")
        words = f"--dnn resnet20 --dataset digits --algorithm {algorithm} --max-epochs {epochs} --seed {seed}"
        argv = [*words.split(), "--checkpoint-every", "0", "--output", f"{folder}/run"]
        asked = parse(argv, APP, world_size=ranks)
        SimulatedWorld(ranks).run(lambda comm: run(APP, asked, comm))
        rows: list[dict[str, Any]] = [dict(row) for row in read_metrics(Path(folder) / "run" / "metrics.jsonl")]
    *earlier, last = rows
    return last | {"steps": last["steps"] - (earlier[-1]["steps"] if earlier else 0)}


def _row(name: str, found: Sequence[dict[str, Any]], dense: float | None) -> dict[str, Any]:
    percent = [100 * one["test_accuracy"] for one in found]
    mean = statistics.mean(percent)
    nbytes = statistics.mean(one["bytes_sent"] / one["steps"] for one in found)
    behind = 0.0 if dense is None else dense - mean
    return dict(zip(COLUMNS, (name, mean, min(percent), max(percent), behind, nbytes), strict=True))
