"""The command: which trainings, those that are still missing, and the table.

    python -m bench convergence [--tasks NAME ...] [--optimizers NAME ...] [--ways NAME ...] [--densities D ...]
                                [--clips C ...] [--ranks P ...] [--seeds N] [--steps N] [--full] [--output DIR]

mean, least, most: of the seeds, test accuracy in percent, or perplexity of a character for text. behind: points below
dense with the same optimizer, clipping, ranks and seeds; for text by how many percent the perplexity is above. network
seconds: of a step, predicted from bytes and messages. until: share of the steps after which the median seed is as good
as dense at the end, less a point of accuracy or 1 % of the loss. With --output each training is written down when it
has ended, and not repeated when the command is given again, unless the record lacks its bytes on the way. Ways that
begin with "torch" are torch's own, on real ranks: see `torch_hooks`; those of `periodic` average models.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.convergence import curves, densities, journal
from bench.convergence.quality import goal_of, steps_until
from bench.convergence.tasks import TASKS
from bench.convergence.ways import OPTIMIZERS, WAYS, Run
from bench.record import asked, parser_of, record

DENSE, FIRST, RECOMMENDED = "dense", "gtopk, as first written", "gtopk"
LABELS = ("task", "optimizer", "clip", "way", "density", "ranks", "steps")
SHOWN = (*LABELS, "seeds", "mean", "least", "most", "behind", "bytes_a_step")
QUICK = {"ways": (DENSE, FIRST, RECOMMENDED), "tasks": ("cnn-digits", "vit-digits")}

AGAINST = "dense, with the same settings and seeds"


def main(argv: Sequence[str] = ()) -> None:
    """Trains what is missing, prints the table."""
    options = _asked(argv)
    runs = list(_runs(options))
    if not runs:
        raise SystemExit(
            f"none of --optimizers {options.optimizers} is for --tasks {options.tasks} and --ways {options.ways}"
        )
    journal.ended(runs, options.output)
    known = list(journal.on_record(options.output).values())
    every = _rows(known)
    if options.accuracy:
        _write_accuracy(options.accuracy, every)
    curves.write(options.output, known)
    record(options, every, labels=LABELS[:5], values=("mean",), against=AGAINST, shown=SHOWN, draw=densities.draw)


def _asked(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("convergence", __doc__, full="the numbers to report: hours")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="NAME")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["sgd", "adamw"], metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="NAME")
    parser.add_argument("--densities", nargs="+", type=float, metavar="D", help="default 0.01; full 0.1 0.01 0.001")
    parser.add_argument("--clips", nargs="+", type=float, default=[0.0], metavar="C", help="default 0: none")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="P", help="default 2; full 4 and 8")
    parser.add_argument("--seeds", type=int, help="default 1; full 5")
    parser.add_argument("--steps", type=int, help="default: each task's own")
    parser.add_argument("--accuracy", type=Path, metavar="FILE", help="where what advise says of accuracy goes")
    return asked(
        parser,
        argv,
        tasks=(QUICK["tasks"], [name for name, task in TASKS.items() if not task.large]),
        ways=(QUICK["ways"], list(WAYS)),
        densities=([0.01], [0.1, 0.01, 0.001]),
        ranks=([2], [4, 8]),
        seeds=(1, 5),
    )


def _runs(options: argparse.Namespace) -> Iterator[Run]:
    """Seeds last but one another, so that a record that is cut short has all ways."""
    every = product(range(options.seeds), options.tasks, options.ranks, options.optimizers, options.clips)
    for seed, task, ranks, optimizer, clip in every:
        for name in dict.fromkeys([DENSE, *options.ways]):
            way = WAYS[name]
            for density in options.densities if way.selects else [1.0]:
                if optimizer in way.optimizers and optimizer in TASKS[task].rates:
                    steps = options.steps or TASKS[task].steps
                    yield Run(task, optimizer, name, density, clip, ranks, seed, steps)


def _rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One a way, over its seeds."""
    groups: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for one in found:
        groups.setdefault(tuple(one[label] for label in LABELS), {})[one["seed"]] = one
    rows = []
    for labels, by_seed in groups.items():
        row = dict(zip(LABELS, labels, strict=True))
        dense = {
            seed: one["score"]
            for key, others in groups.items()
            if dict(zip(LABELS, key, strict=True)) == row | {"way": DENSE, "density": 1.0}
            for seed, one in others.items()
        }
        scores = {seed: one["score"] for seed, one in by_seed.items()}
        rows.append(
            row
            | {"seeds": len(scores), "mean": statistics.mean(scores.values())}
            | {"least": min(scores.values()), "most": max(scores.values()), "behind": _behind(row, scores, dense)}
            | _sent(list(by_seed.values()))
            | {"until": _until(row, list(by_seed.values()), list(dense.values()))}
            | {"score_samples": [scores[seed] for seed in sorted(scores)]}
        )
    return rows


def _write_accuracy(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Of the ways that are advised, without clipping; Adam learns as AdamW does, which is what was trained."""
    kept, dense = [], {_place(row): row["until"] for row in rows if row["way"] == DENSE}
    for row in rows:
        way = WAYS[row["way"]]
        if way.advised and not row["clip"] and row["behind"] is not None:
            algorithm, wire = way.advised
            run = Run(seed=0, **{name: row[name] for name in LABELS})
            sends = "updates" if way.settings(run).get("updates") else "gradients"
            kind = {"algorithm": algorithm, "wire": wire, "sends": sends, "data": TASKS[row["task"]].data}
            for optimizer in ("adam", "adamw") if row["optimizer"] == "adamw" else (row["optimizer"],):
                names = ("task", "density", "ranks", "steps", "seeds", "behind", "until")
                more = {name: row[name] for name in names} | {"dense_until": dense[_place(row)]}
                kept.append({"optimizer": optimizer} | kind | more)
    said = "written by python -m bench convergence --output DIR --accuracy FILE"
    path.write_text(json.dumps({"note": said, "rows": kept}, indent=1) + "\n")


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "optimizer", "clip", "ranks", "steps"))


def _until(row: dict[str, Any], seeds: Sequence[dict[str, Any]], dense: Sequence[float]) -> float | None:
    """Share of the steps after which the median seed is as good as dense at the end, None: never. dense: its scores."""
    if not dense:
        return None
    goal, text = goal_of(row["task"], dense), TASKS[row["task"]].text
    steps = statistics.median(steps_until(one["curve"], goal, text=text) for one in seeds)
    return None if steps == math.inf else steps / int(row["steps"])


def _sent(seeds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Bytes and network seconds of a step, means; of the first records only where there are no later ones.

    Since then a warm-up sends whole gradients in half of the bytes, and the first copy of the model is not counted.
    """
    counted = [one for one in seeds if journal.is_whole(one)] or seeds
    names = [name for name in counted[0] if name == "bytes_a_step" or name.startswith("network")]
    return {name: statistics.mean(one[name] for one in counted) for name in names}


def _behind(row: dict[str, Any], scores: dict[int, float], dense: dict[int, float]) -> float | None:
    """With the seeds that both have; None where dense has none of them."""
    both = [seed for seed in scores if seed in dense]
    if not both:
        return None
    mean, whole = (statistics.mean(of[seed] for seed in both) for of in (scores, dense))
    return 100 * (mean / whole - 1) if TASKS[row["task"]].text else whole - mean
