"""The demo on several seeds: ResNet-20 on real digits, four MPI ranks, dense beside gTop-k.

    python -m bench demo [--seeds N] [--full] [--output DIR]

What `python -m thinwire_cifar.demo` trains, by that command, once a seed. accuracy: test accuracy in percent, one of
the 360 images is 0.28 points; mean, least and most of the seeds. at_default: of seed 0, which the demo has by itself.
behind, behind_at_default: points by which gTop-k is below dense with the same seed, in the mean and at seed 0. error:
the standard error that so few test images leave of such a difference at one seed, in the mean of the seeds.
"""

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire_cifar.comparison import ALGORITHMS, Summary, summarise
from thinwire_cifar.data.digits import TEST_SIZE
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.records.run_folder import RunFolder

from bench.record import asked, parser_of, record

AGAINST = "dense, with the same seed"


def main(argv: Sequence[str] = ()) -> None:
    """Trains with one seed after another, prints a line for each."""
    parser = parser_of("demo", __doc__, full="5 seeds instead of 1")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 5")
    options = asked(parser, argv, seeds=(1, 5))
    rows = rows_of([_trained(seed) for seed in range(options.seeds)])
    values = ("mean", "least", "most")
    shown = ("algorithm", *values, "at_default", "behind", "behind_at_default", "error")
    record(options, rows, labels=shown[:1], values=values, against=AGAINST, shown=shown)


def _trained(seed: int) -> dict[str, Summary]:
    """By algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--seed", str(seed), "--output", f"{folder}/demo"]
        subprocess.run([sys.executable, "-m", "thinwire_cifar.demo", *words], stdout=subprocess.DEVNULL, check=True)
        runs = {name: read_metrics(RunFolder(Path(folder) / "demo" / name).metrics.path) for name in ALGORITHMS}
    return {name: summarise(rows, images=TEST_SIZE) for name, rows in runs.items()}


def rows_of(found: Sequence[Mapping[str, Summary]]) -> list[dict[str, Any]]:
    """One an algorithm. found: of every seed, from 0 on, what each algorithm came to; the first is compared with."""
    first = next(iter(found[0]))
    rows = []
    for name in found[0]:
        scores = [100 * one[name].accuracy for one in found]
        behind = [100 * (one[first].accuracy - one[name].accuracy) for one in found]
        row: dict[str, Any] = {"algorithm": name, "seeds": len(found), "mean": statistics.mean(scores)}
        row |= {"least": min(scores), "most": max(scores), "at_default": scores[0]}
        row |= {"behind": statistics.mean(behind), "behind_at_default": behind[0]}
        row["error"] = statistics.mean(100 * math.hypot(one[first].uncertainty, one[name].uncertainty) for one in found)
        row["bytes_a_step"] = statistics.mean(one[name].nbytes for one in found)
        rows.append(row | {"accuracy_samples": scores, "behind_samples": behind})
    return rows
