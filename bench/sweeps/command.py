"""What decides how well a sparse training learns, one thing at a time: density, residuals, momentum.

    python -m bench sweeps [--ranks P] [--seeds N] [--steps N] [--full] [--output DIR]

A small CNN on 8 × 8 digits with SGD, ranks simulated: real schedules with real payloads, in one process. All settings
but the one that is swept are the same: gTop-k of 1 %, momentum 0.9 before the selection, no warm-up. One row a setting;
mean, least, most: of the seeds, test accuracy in percent; an image is 0.28 points. diverged: seeds whose
gradients became infinite; they count as 0 %. dense: what dense has with the same seeds, momentum after the sum. In the
.json also `delta`, by density, seed and step, see `bench.sweeps.delta`.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from communicators import CollectiveError

from bench.convergence.training import trained
from bench.convergence.ways import Run, Way
from bench.record import asked, parser_of, record
from bench.sweeps.delta import Observed
from bench.sweeps.picture import draw
from bench.sweeps.settings import DENSE, OURS, Setting, observed, settings

TASK = "cnn-digits"
STEPS = 176  # two thirds of the task's own
DIVERGED = 0.0
SHOWN = ("sweep", "setting", "density", "seeds", "mean", "least", "most", "dense", "diverged")
AGAINST = "dense, with the same learning rate, steps and seeds"


def main(argv: Sequence[str] = ()) -> None:
    """Trains all, prints the table."""
    parser = parser_of("sweeps", __doc__, full="the numbers to report: minutes")
    parser.add_argument("--ranks", type=int, default=4, metavar="P", help="default 4")
    parser.add_argument("--seeds", type=int, help="default 1; full 3")
    parser.add_argument("--steps", type=int, help=f"default 44; full {STEPS}")
    options = asked(parser, argv, seeds=(1, 3), steps=(44, STEPS))
    one = partial(_scores, ranks=options.ranks, seeds=options.seeds, steps=options.steps)
    found, known = list[dict[str, Any]](), dict[tuple[Way, float], list[float]]()  # of `delta`; scores
    swept = list(settings())
    for setting in (DENSE, *swept):
        if (setting.way, setting.density) not in known:
            known[setting.way, setting.density] = one(setting, found)
    dense = statistics.mean(known[DENSE.way, DENSE.density])
    rows = [_row(setting, known[setting.way, setting.density], dense) for setting in swept]
    setup = {"task": TASK, "ranks": options.ranks, "steps": options.steps, "ranks_are": "simulated"}
    more: dict[str, Any] = {"draw": partial(draw, delta=found), "setup": setup, "delta": found}
    record(options, rows, labels=SHOWN[:3], values=("mean",), against=AGAINST, shown=SHOWN, **more)


def _scores(setting: Setting, delta: list[dict[str, Any]], *, ranks: int, seeds: int, steps: int) -> list[float]:
    """Of every seed; what was observed of ours is put into `delta`."""
    scores = []
    for seed in range(seeds):
        run = Run(TASK, "sgd", setting.name, setting.density, 0.0, ranks, seed, steps)
        watch = Observed()
        way = observed(watch) if setting.way == OURS else setting.way
        scores.append(_score(run, way))
        delta += [{"density": setting.density, "seed": seed, **point} for point in watch.points()]
    print(f"{setting.sweep}, {setting.name}, {setting.density:g}: {statistics.mean(scores):.1f}", flush=True)
    return scores


def _score(run: Run, way: Way) -> float:
    try:
        return float(trained(run, ways={run.way: way})["score"])
    except CollectiveError as error:
        if "is not finite" not in str(error):
            raise
        return DIVERGED


def _row(setting: Setting, scores: Sequence[float], dense: float) -> dict[str, Any]:
    labels = {"sweep": setting.sweep, "setting": setting.name, "density": setting.density, "seeds": len(scores)}
    spread = {"mean": statistics.mean(scores), "least": min(scores), "most": max(scores), "dense": dense}
    spread["diverged"] = sum(score == DIVERGED for score in scores)
    return {**labels, **spread, "score_samples": list(scores)}
