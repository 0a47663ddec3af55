"""Several runs in one picture: loss and test metrics against epochs, bytes sent and seconds.

python -m trainer.plot runs/dense runs/gtopk --output runs.svg
"""

import math
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from textwrap import fill

from thinwire_trainer.errors import START_AGAIN, RunError, told
from thinwire_trainer.launching.workers import WRONG_USAGE
from thinwire_trainer.records.metrics import Row, read_metrics
from thinwire_trainer.records.run_folder import RunFolder

MEBI = 1 << 20
LABELS = {"train_loss": "training loss", "test_accuracy": "test accuracy", "test_loss": "test loss"}
NEEDED = {"epoch", "train_loss", "seconds", "bytes_sent"}
KINDS = (".png", ".svg", ".pdf")
WIDTH = 150  # characters of the picture
COLOURS, STYLES = 10, ("-", "--", ":", "-.")  # matplotlib's colours, then they come again in another style


def plot_runs(runs: Mapping[str, Sequence[Row]], path: Path, *, curves: Mapping[str, str]) -> None:
    """Write a picture (its kind by the path's suffix) of the runs, by name.

    curves: what to show, metric -> label of the axis; one line of panels each. A run without a metric has no curve
    there, and a loss that is not finite is a gap; every epoch has a dot, so that one between two gaps is seen. Bytes
    are those of the busiest rank, on a logarithmic axis, because they differ by orders of magnitude; a run that sent
    none has no curve there.
    """
    from matplotlib.figure import Figure  # half a second, which ranks that plot nothing are spared

    columns = max(1, WIDTH // (max(map(len, runs)) + 6))  # of the legend
    figure = Figure(figsize=(13, 3.2 * len(curves) + 0.2 * -(-len(runs) // columns)), layout="constrained")
    panels = figure.subplots(len(curves), 3, squeeze=False, sharey="row")
    for line, (metric, label) in zip(panels, curves.items(), strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            style = STYLES[number // COLOURS % len(STYLES)]
            values = [_number(row.get(metric)) for row in rows]
            sent = accumulate(_number(row["bytes_sent"]) / MEBI for row in rows)
            on_axis = [total or math.nan for total in sent] if _any_sent(runs) else list(sent)
            taken = accumulate(_number(row["seconds"]) for row in rows)
            for panel, progress in zip(line, ([row["epoch"] for row in rows], on_axis, list(taken)), strict=True):
                panel.plot(progress, values, label=name, linestyle=style, marker=".", markersize=4)
        line[0].set(xlabel="epoch", ylabel=label)
        line[0].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        line[1].set(xlabel="MiB sent by a rank", xscale="log" if _any_sent(runs) else "linear")
        line[2].set(xlabel="seconds of training and evaluation")
        for panel in line:
            panel.grid(alpha=0.3)
    legend = figure.legend(panels[0][0].lines, [""] * len(runs), loc="outside upper left", ncols=columns)
    for text, name in zip(legend.get_texts(), runs, strict=True):
        text.set(text=fill(name, WIDTH), parse_math=False)  # as it is, with any _ and $
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> int:
    """Reads the runs and writes the picture; returns the exit code."""
    parser = ArgumentParser(prog="python -m trainer.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the --output of a run")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help=f"{', '.join(KINDS)}; default: runs.png")
    given = parser.parse_args(argv)
    try:
        if given.output.suffix not in KINDS:
            raise RunError(f"--output {given.output}: its name is to end in {', '.join(KINDS)}")
        if not given.output.parent.is_dir():
            raise RunError(f"--output {given.output}: there is no folder {given.output.parent}: make it")
        runs = {name: rows_of(path) for name, path in named(given.runs).items()}
        plot_runs(runs, given.output, curves=curves_of(runs))
    except (RunError, OSError) as error:
        print(f"trainer.plot: error: {told(error, advice=START_AGAIN)}", file=sys.stderr)
        return WRONG_USAGE
    print(given.output)
    return 0


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """The runs by what their paths do not have in common."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    if len(set(absolute)) < len(absolute):
        raise RunError("a run is given twice: give each once")
    common = Path(os.path.commonpath([path.parent for path in absolute]))
    return {str(path.relative_to(common)): path for path in absolute}


def rows_of(path: Path) -> list[Row]:
    """The epochs of a run; RunError where there are none."""
    file = RunFolder(path).metrics.path
    try:
        rows = read_metrics(file)
    except (ValueError, RecursionError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise RunError(f"{file} cannot be read ({reason}): give the --output of a run") from None
    if not all(map(_is_epoch, rows)):
        raise RunError(f"{file} holds other things than epochs: give the --output of a run")
    if not rows:
        raise RunError(f"{file} has no epoch yet")
    return rows


def _is_epoch(row: object) -> bool:
    """Whether a row is as the loop writes them: counts, the training loss, the task's metrics, seconds."""
    if not isinstance(row, dict) or not row.keys() >= NEEDED or not _losses_and_metrics(list(row)):
        return False
    counts = all(type(row[name]) is int and 0 <= row[name] < 1 << 63 for name in ("epoch", "bytes_sent"))
    return counts and all(row[name] is None or isinstance(row[name], float | int) for name in ("train_loss", "seconds"))


def curves_of(runs: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """The training loss, and what any of the runs were tested for."""
    shown = dict.fromkeys(name for rows in runs.values() for name in _losses_and_metrics(list(rows[0])))
    return {name: LABELS.get(name, name.replace("_", " ")) for name in shown}


def _losses_and_metrics(names: Sequence[str]) -> Sequence[str]:
    """Names from the training loss up to the seconds, where the loop writes the task's own."""
    return names[names.index("train_loss") : names.index("seconds")]


def _any_sent(runs: Mapping[str, Sequence[Row]]) -> bool:
    return any(row["bytes_sent"] for rows in runs.values() for row in rows)


def _number(value: float | str | None) -> float:
    return value if isinstance(value, int | float) else math.nan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
