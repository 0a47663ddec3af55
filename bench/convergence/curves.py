"""Scores on the way: against steps, bytes of the busiest rank, and seconds that a network takes for them.

Bytes are those that were counted until then, since a warm-up sends most of them first. Trainings of the first records,
of which they were not written down, have none.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.convergence.tasks import TASKS
from bench.convergence.training import LINKS

PANELS = {
    "step": "steps",
    "bytes": "MB of the busiest rank",
    **{f"network_seconds_{name}": f"predicted seconds of exchange, {name}" for name in LINKS},
}
DRAWN = {
    "dense": "-",
    "torch bf16 hook": "s--",
    "torch PowerSGD hook": "^--",
    "gtopk, as first written": "x:",
    "gtopk": "o-",
    "spardl": "v-",
    "dgc": "d--",
    "sparseloco": "P--",
}
"""Ways, and how their lines look."""

NAMES = ("task", "optimizer", "clip", "ranks", "steps", "way", "density")


def points(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One a training and place of its curve, means over seeds. network seconds: predicted, without computing."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault(tuple(one[name] for name in NAMES), []).append(one)
    rows = []
    for labels, seeds in groups.items():
        for place in range(min(len(one["curve"]) for one in seeds)):
            step = seeds[0]["curve"][place][0]
            rows.append(
                dict(zip(NAMES, labels, strict=True))
                | {"step": step, "mean": statistics.mean(one["curve"][place][1] for one in seeds)}
                | {"least": min(one["curve"][place][1] for one in seeds)}
                | {"most": max(one["curve"][place][1] for one in seeds), "seeds": len(seeds)}
                | _sent([one["curve"][place] for one in seeds])
            )
    return rows


def _sent(seeds: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """bytes until this place of the curve, and network seconds: of the seeds of which they were recorded, or None."""
    names = {name: f"network_seconds_{name}" for name in LINKS}
    counted = [point for point in seeds if len(point) == 4]
    if not counted:
        return dict.fromkeys(("bytes", *names.values()))
    nbytes, messages = (statistics.mean(point[column] for point in counted) for column in (2, 3))
    seconds = {names[name]: messages * link.alpha + nbytes * link.beta for name, link in LINKS.items()}
    return {"bytes": nbytes, **seconds}


def write(folder: Path, found: Sequence[dict[str, Any]]) -> None:
    """folder/convergence-curves.csv, and .png: of the ways and densities in DRAWN, without clipping.

    One row of panels a task and optimizer, at its own number of steps, on 2 ranks.
    """
    rows = points(found)
    with (folder / "convergence-curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    drawn = [row for row in rows if _is_drawn(row)]
    if drawn:
        _draw(folder / "convergence-curves.png", drawn)


def _is_drawn(row: dict[str, Any]) -> bool:
    usual = row["ranks"] == 2 and not row["clip"] and row["steps"] == TASKS[row["task"]].steps
    return usual and row["way"] in DRAWN and row["density"] in (1.0, 0.01)


def _draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A line has its band from the least to the most of the seeds; without bytes it is in the first panel alone."""
    from matplotlib.figure import Figure

    pictures = [key for key in product(TASKS, ("sgd", "adamw")) if any(_of(row) == key for row in rows)]
    figure = Figure(figsize=(4.2 * len(PANELS), 3 * len(pictures) + 1), layout="constrained")
    lines: dict[str, Any] = {}
    for key, panels in zip(pictures, figure.subplots(len(pictures), len(PANELS), squeeze=False), strict=True):
        here = [row for row in rows if _of(row) == key]
        for axes, across in zip(panels, PANELS, strict=True):
            for way in DRAWN:
                line = [row for row in here if row["way"] == way and row[across] is not None]
                if line:
                    lines[way] = _line(axes, line, across, way)
            _name(axes, key, across, here)
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=len(lines))
    figure.savefig(path, dpi=80)


def _of(row: dict[str, Any]) -> tuple[str, str]:
    return row["task"], row["optimizer"]


def _unit(across: str) -> float:
    return 1e-6 if across == "bytes" else 1.0


def _line(axes: Any, line: Sequence[dict[str, Any]], across: str, way: str) -> Any:
    xs = [_unit(across) * row[across] for row in line]
    colour = f"C{list(DRAWN).index(way)}"
    (drawn,) = axes.plot(xs, [row["mean"] for row in line], DRAWN[way], color=colour, markersize=4)
    low, high = ([row[name] for row in line] for name in ("least", "most"))
    axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
    return drawn


def _name(axes: Any, key: tuple[str, str], across: str, here: Sequence[dict[str, Any]]) -> None:
    """Ends of the vertical axis are those at which lines can be told apart: not where all begin."""
    task, optimizer = key
    axes.set_xlabel(PANELS[across])
    axes.grid(alpha=0.3)
    if across != "step":
        _in_decades(axes, [_unit(across) * row[across] for row in here if row[across]])
    scores = [row["mean"] for row in here]
    if TASKS[task].text:
        axes.set_ylim(0.95 * min(scores), min(2.0 * min(scores), 1.05 * max(scores)))
    else:
        axes.set_ylim(min(70.0, max(scores) - 5), 100)
    if across == "step":
        seeds = sorted({row["seeds"] for row in here})
        said = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        axes.set_title(f"{task}, {optimizer}; seeds: {said}", fontsize="medium", loc="left")
        axes.set_ylabel("perplexity" if TASKS[task].text else "accuracy in %")


def _in_decades(axes: Any, xs: Sequence[float]) -> None:
    """Plain numbers at powers of ten, and between them where there are few."""
    from matplotlib.ticker import LogLocator, NullLocator

    if not xs:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center")
        axes.set_xticks([])
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if max(xs) > 30 * min(xs) else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
