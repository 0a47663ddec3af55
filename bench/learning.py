"""How well every `--algorithm` learns a task of the apps: on 4 simulated ranks, several seeds, equal epochs.

    python -m bench learning [--task digits|pydoc|averaging] [--ranks P] [--seeds N] [--epochs N]
                             [--algorithms NAME ...] [--jobs N] [--full] [--output DIR]

digits: ResNet-20 on real digits. mean, least, most: test accuracy in percent of the exported model over the seeds, in
the bits that real ranks have. behind: points by which the mean is below dense's, same seeds; one of the 360 test images
is 0.28 points.
pydoc: an LSTM of 64 units on the words of Python's documentation. mean, least, most: perplexity. behind: percent by
which the mean is above dense's.
averaging: periodic averaging at its defaults round the commonest optimizers: a CNN and a small vision transformer on
the digits, each with SGD of momentum 0.9 and with AdamW, 2 ranks. behind: points by which the mean is below that of
local-sgd.
bytes a step: of the busiest rank, in the last epoch, evaluations left out.
settings: what an algorithm is given besides the task's own flags, where it learns better with it (`Learning.settings`).
"""

import io
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from communicators import SimulatedWorld
from local_sgd import ALGORITHMS
from thinwire_cifar.__main__ import APP as CIFAR
from thinwire_text.__main__ import APP as TEXT
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.table import TABLE
from torch import nn

from bench.convergence import tasks
from bench.record import asked, parser_of, record

COLUMNS = ("algorithm", "mean", "least", "most", "behind", "bytes_a_step", "settings")


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One task. measure: of a row of metrics; behind: how much worse a mean is than `first`'s.

    settings: by algorithm, flags that it gets besides `words`; others go by the app's defaults.
    cases: by name, flags of theirs besides; each is compared with its own `first`. algorithms: by default all.
    """

    words: str
    name: str  # of what --output gets
    epochs: int
    app: App = CIFAR
    measure: Callable[[dict[str, Any]], float] = lambda row: 100 * float(row["test_accuracy"])
    behind: Callable[[float, float], float] = lambda mean, first: first - mean
    settings: Mapping[str, str] = field(default_factory=dict)
    cases: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    first: str = "dense"
    algorithms: Sequence[str] = tuple(TABLE)
    ranks: int = 4
    seeds: int = 3  # of --full


AS_DENSE = dict.fromkeys(("eager-solo", "eager-majority", "eager-quorum"), "--no-nesterov")

TASKS = {
    "digits": Learning(words="--dnn resnet20 --dataset digits", name="learning", epochs=20, settings=AS_DENSE),
    "pydoc": Learning(
        app=TEXT,
        words="--dnn lstm-small --dataset pydoc --hidden 64 --batch-size 8",
        name="learning-pydoc",
        epochs=4,
        measure=lambda row: float(row["perplexity"]),
        behind=lambda mean, dense: 100 * (mean / dense - 1),
        settings={"dense": "--clip-norm 0.125", "gtopk": "--lr 16", "diloco": "--lr 4"}
        | {name: f"{flags} --clip-norm 0.125" for name, flags in AS_DENSE.items()},  # docs/apps/text.md
    ),
    "averaging": Learning(
        words="--dataset digits",
        name="learning-averaging",
        epochs=12,
        cases={
            f"{model}, {optimizer}": f"--dnn bench.learning:small_{model.lower()} {flags}"
            for model in ("CNN", "ViT")
            for optimizer, flags in (("SGD", ""), ("AdamW", "--optimizer adamw --lr 0.003"))
        },
        first="local-sgd",
        algorithms=("dense", *ALGORITHMS),
        ranks=2,
        seeds=5,
    ),
}


def main(argv: Sequence[str] = ()) -> None:
    """Trains them one after another, prints a row for each."""
    parser = parser_of("learning", __doc__, full="the numbers to report")
    parser.add_argument("--task", choices=TASKS, default="digits", help="default digits")
    parser.add_argument("--ranks", type=int, help="default 4, of averaging 2")
    parser.add_argument("--seeds", type=int, help="default 1, with --full 3, of averaging 5")
    parser.add_argument("--epochs", type=int, help="default 20, of pydoc 4, of averaging 12")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", choices=TABLE, help="default: all of the task")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side; they change no bit")
    chosen = TASKS[parser.parse_args(argv).task]
    of_task = {name: (getattr(chosen, name),) * 2 for name in ("ranks", "epochs", "algorithms")}
    options = asked(parser, argv, seeds=(1, chosen.seeds), **of_task)
    task, labels = TASKS[options.task], ("case",) * (len(chosen.cases) > 1) + COLUMNS[:1]
    names = list(dict.fromkeys([task.first, *options.algorithms]))
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        one = partial(_trained, options.task, ranks=options.ranks, epochs=options.epochs)
        runs = {
            (case, name): [pool.submit(one, case, name, seed=seed) for seed in range(options.seeds)]
            for case in task.cases
            for name in names
        }
        against, shown = f"{task.first}, with the same settings and seeds", labels + COLUMNS[1:]
        rows = _rows(task, runs)
        record(options, rows, name=task.name, labels=labels, values=("mean",), against=against, shown=shown)


def _rows(task: Learning, runs: Mapping[tuple[str, str], Sequence[Future[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """A row each, as soon as its runs have ended. runs: by case and algorithm, of a case the `first` one first."""
    firsts = dict[str, float]()
    for (case, name), found in runs.items():
        row = _row(task, name, [run.result() for run in found], firsts.get(case))
        firsts.setdefault(case, row["mean"])
        yield ({"case": case} if case else {}) | row


def asking(task: Learning, algorithm: str, *, epochs: int, seed: int, case: str = "") -> list[str]:
    """The flags of one run, but for its output: the task's, the case's, then the algorithm's own."""
    words = f"{task.words} --algorithm {algorithm} --max-epochs {epochs} --seed {seed} --checkpoint-every 0"
    return [*words.split(), *task.cases.get(case, "").split(), *task.settings.get(algorithm, "").split()]


def small_cnn(*, channels: int, classes: int, size: int) -> nn.Module:
    """For `--dnn`: the CNN that the other benchmarks train on digits."""
    return tasks.cnn()


def small_vit(*, channels: int, classes: int, size: int) -> nn.Module:
    """For `--dnn`: their vision transformer."""
    return tasks.ViT()


def _trained(name: str, case: str, algorithm: str, *, ranks: int, epochs: int, seed: int) -> dict[str, Any]:
    """The last epoch's metrics, of this task."""
    task = TASKS[name]
    silent = redirect_stdout(io.StringIO())  # the table is what is shown
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), silent:
        warnings.simplefilter("ignore")
        argv = [*asking(task, algorithm, epochs=epochs, seed=seed, case=case), "--output", f"{folder}/run"]
        asked = parse(argv, task.app, world_size=ranks)
        SimulatedWorld(ranks).run(lambda comm: run(task.app, asked, comm))
        rows: list[dict[str, Any]] = [dict(row) for row in read_metrics(Path(folder) / "run" / "metrics.jsonl")]
    *earlier, last = rows
    return last | {"steps": last["steps"] - (earlier[-1]["steps"] if earlier else 0)}


def _row(task: Learning, name: str, found: Sequence[dict[str, Any]], first: float | None) -> dict[str, Any]:
    measured = [task.measure(one) for one in found]
    mean = statistics.mean(measured)
    nbytes = statistics.mean(one["bytes_sent"] / one["steps"] for one in found)
    behind = 0.0 if first is None else task.behind(mean, first)
    values = (name, mean, min(measured), max(measured), behind, nbytes, task.settings.get(name, ""))
    return dict(zip(COLUMNS, values, strict=True)) | {"score_samples": measured}
