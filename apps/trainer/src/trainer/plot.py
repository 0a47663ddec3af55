"""Several runs in one picture: loss and accuracy against epochs and against bytes sent."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from trainer.records.metrics import Row

MEBI = 1 << 20


def plot_runs(runs: Mapping[str, Sequence[Row]], path: Path, *, curves: Mapping[str, str]) -> None:
    """Write a picture (its kind by the path's suffix) of the runs, by name.

    curves: what to show, metric -> label of the axis; one line of panels each. Bytes are those of the busiest rank,
    on a logarithmic axis, because they differ by orders of magnitude.
    """
    figure = Figure(figsize=(10, 3.2 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), 2, squeeze=False, sharey="row")
    for line, (metric, label) in zip(panels, curves.items(), strict=True):
        for name, rows in runs.items():
            values = [row[metric] for row in rows]
            sent = accumulate(_number(row["bytes_sent"]) / MEBI for row in rows)
            line[0].plot([row["epoch"] for row in rows], values, label=name)
            line[1].plot(list(sent), values, label=name)
        line[0].set(xlabel="epoch", ylabel=label)
        line[1].set(xlabel="MiB sent by a rank", xscale="log")
        for panel in line:
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, dpi=120)


def _number(value: float | str | None) -> float:
    assert isinstance(value, int | float)
    return value
