"""The sweeps as bars, and δ through training as curves."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sweeps.delta import KEPT


def draw(path: Path, rows: Sequence[Mapping[str, Any]], *, delta: Sequence[Mapping[str, Any]]) -> None:
    """Left every setting, with its least and most; right a picture for each of what is kept, a curve a density."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    axes = figure.subplot_mosaic([["bars", kept] for kept in KEPT])
    _bars(axes["bars"], rows)
    for kept in KEPT:
        _curves(axes[kept], kept, delta)
    axes[KEPT[-1]].set_xlabel("step")
    figure.savefig(path, dpi=90)


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    colours = {sweep: f"C{number}" for number, sweep in enumerate(dict.fromkeys(row["sweep"] for row in rows))}
    means = [row["mean"] for row in rows]
    spread = [
        [row["mean"] - row["least"] for row in rows],
        [row["most"] - row["mean"] for row in rows],
    ]
    axes.barh(range(len(rows)), means, xerr=spread, color=[colours[row["sweep"]] for row in rows])
    names = [f"{row['sweep']}: {row['setting']}, {row['density']:.1%}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="x-small")
    axes.axvline(rows[0]["dense"], color="black", linewidth=1, label="dense")
    axes.invert_yaxis()
    axes.set_title("test accuracy in %, mean of the seeds, least and most")
    axes.legend(loc="lower left")


def _curves(axes: Any, kept: str, delta: Sequence[Mapping[str, Any]]) -> None:
    for density in dict.fromkeys(point["density"] for point in delta):
        by_step: dict[int, list[float]] = {}
        for point in delta:
            if point["density"] == density:
                by_step.setdefault(point["step"], []).append(point[kept])
        axes.plot(list(by_step), [statistics.mean(found) for found in by_step.values()], label=f"{density:.1%}")
        axes.fill_between(list(by_step), list(map(min, by_step.values())), list(map(max, by_step.values())), alpha=0.2)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_title(f"δ of {kept}", fontsize="medium")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", title="density", loc="lower right")
    axes.grid(alpha=0.3)
