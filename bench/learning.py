"""How well every `--algorithm` learns a task of the apps: on 4 simulated ranks, several seeds, equal epochs.

    python -m bench learning [--task digits|pydoc] [--ranks P] [--seeds N] [--epochs N] [--algorithms NAME ...]
                             [--jobs N] [--full] [--output DIR]

digits: ResNet-20 on real digits. mean, least, most: test accuracy in percent of the exported model over the seeds, in
the bits that real ranks have. behind: points by which the mean is below dense's, same seeds; one of the 360 test images
is 0.28 points.
pydoc: an LSTM of 64 units on the words of Python's documentation. mean, least, most: perplexity. behind: percent by
which the mean is above dense's.
bytes a step: of the busiest rank, in the last epoch, evaluations left out.
settings: what an algorithm is given besides the task's own flags, where it learns better with it (`Learning.settings`).
"""

from __future__ import annotations

import io
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from communicators import SimulatedWorld
from thinwire_cifar.__main__ import APP as CIFAR
from thinwire_text.__main__ import APP as TEXT
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.table import TABLE

from bench.form import asked, parser_of
from bench.record import record

COLUMNS = ("algorithm", "mean", "least", "most", "behind", "bytes_a_step", "settings")


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One task. measure: of a row of metrics; behind: how much worse a mean is than dense's; much: what is marked.

    settings: by algorithm, flags that it gets besides `words`; others go by the app's defaults.
    """

    app: App
    words: str
    name: str  # of what --output gets
    epochs: int
    measure: Callable[[dict[str, Any]], float]
    behind: Callable[[float, float], float]
    much: float
    heading: str
    settings: Mapping[str, str] = field(default_factory=dict)


TASKS = {
    "digits": Learning(
        app=CIFAR,
        words="--dnn resnet20 --dataset digits",
        name="learning",
        epochs=20,
        measure=lambda row: 100 * float(row["test_accuracy"]),
        behind=lambda mean, dense: dense - mean,
        much=1.0,
        heading="accuracy in %, mean of {seeds} | of each | points behind dense",
    ),
    "pydoc": Learning(
        app=TEXT,
        words="--dnn lstm-small --dataset pydoc --hidden 64 --batch-size 8",
        name="learning-pydoc",
        epochs=4,
        measure=lambda row: float(row["perplexity"]),
        behind=lambda mean, dense: 100 * (mean / dense - 1),
        much=10.0,
        heading="perplexity, mean of {seeds} | of each | % above dense",
        settings={"dense": "--clip-norm 0.125", "gtopk": "--lr 16", "diloco": "--lr 4"},  # see docs/apps/text.md
    ),
}

AGAINST = "dense, with the same settings and seeds"


def main(argv: Sequence[str] = ()) -> int:
    """Trains them one after another, prints a row for each; returns the exit status."""
    parser = parser_of("learning", __doc__, full="the numbers to report")
    parser.add_argument("--task", choices=TASKS, default="digits", help="default digits")
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3")
    parser.add_argument("--epochs", type=int, help="default 20, of pydoc 4")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", choices=TABLE, default=list(TABLE))
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side; they change no bit")
    options, facts = asked(parser, argv, seeds=(1, 3))
    seeds, rows = options.seeds, list[dict[str, Any]]()
    task = TASKS[options.task]
    print("  ".join(f"{name:>17}" for name in COLUMNS), flush=True)
    names = dict.fromkeys(["dense", *options.algorithms])
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        one = partial(_trained, options.task, ranks=options.ranks, epochs=options.epochs or task.epochs)
        runs = {name: [pool.submit(one, name, seed=seed) for seed in range(seeds)] for name in names}
        for name, found in runs.items():
            rows.append(_row(task, name, [run.result() for run in found], rows[0]["mean"] if rows else None))
            cells = [
                f"{value:,.1f}" if isinstance(value, float) else str(value) for value in map(rows[-1].get, COLUMNS)
            ]
            print("  ".join(f"{cell:>17}" for cell in cells), flush=True)
    record(options.output, task.name, rows, labels=COLUMNS[:1], values=("mean",), facts=facts, against=AGAINST)
    (options.output / f"{task.name}.md").write_text(_markdown(task, rows, seeds))
    return 0


def _markdown(task: Learning, rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """The table for a page; an algorithm that is much behind is marked, for a reason to be given."""
    heading = task.heading.format(seeds="1 seed" if seeds == 1 else f"{seeds} seeds")
    lines = [f"| `--algorithm` | {heading} | bytes a step |"]
    lines.append("|---|---|---|---|---|")
    if task.settings:
        lines = [f"{line} {cell} |" for line, cell in zip(lines, ("settings", "---"), strict=True)]
    for row in rows:
        marked = f"**{row['behind']:.1f}**" if row["behind"] > task.much else f"{row['behind']:.1f}"
        spread = f"{row['least']:.1f} … {row['most']:.1f}"
        line = f"| `{row['algorithm']}` | {row['mean']:.1f} | {spread} | {marked} | {row['bytes_a_step']:,.0f} |"
        lines.append(f"{line} {_as_code(row['settings'])} |" if task.settings else line)
    return "\n".join(lines) + "\n"


def asking(task: Learning, algorithm: str, *, epochs: int, seed: int) -> list[str]:
    """The flags of one run, but for its output: the task's, then the algorithm's own."""
    words = f"{task.words} --algorithm {algorithm} --max-epochs {epochs} --seed {seed} --checkpoint-every 0"
    return [*words.split(), *task.settings.get(algorithm, "").split()]


def _as_code(words: str) -> str:
    return f"`{words}`" if words else ""


def _trained(name: str, algorithm: str, *, ranks: int, epochs: int, seed: int) -> dict[str, Any]:
    """The last epoch's metrics, of this task."""
    task = TASKS[name]
    silent = redirect_stdout(io.StringIO())  # the table is what is shown
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), silent:
        warnings.simplefilter("ignore")
        argv = [*asking(task, algorithm, epochs=epochs, seed=seed), "--output", f"{folder}/run"]
        asked = parse(argv, task.app, world_size=ranks)
        SimulatedWorld(ranks).run(lambda comm: run(task.app, asked, comm))
        rows: list[dict[str, Any]] = [dict(row) for row in read_metrics(Path(folder) / "run" / "metrics.jsonl")]
    *earlier, last = rows
    return last | {"steps": last["steps"] - (earlier[-1]["steps"] if earlier else 0)}


def _row(task: Learning, name: str, found: Sequence[dict[str, Any]], dense: float | None) -> dict[str, Any]:
    measured = [task.measure(one) for one in found]
    mean = statistics.mean(measured)
    nbytes = statistics.mean(one["bytes_sent"] / one["steps"] for one in found)
    behind = 0.0 if dense is None else task.behind(mean, dense)
    values = (name, mean, min(measured), max(measured), behind, nbytes, task.settings.get(name, ""))
    return dict(zip(COLUMNS, values, strict=True)) | {"score_samples": measured}
