"""Scores on the way: against steps, bytes of the busiest rank, and seconds that a network takes for them.

Bytes are those that were counted until then, since a warm-up sends most of them first. Trainings of which they were not
recorded have none.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.convergence.training import LINKS

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
    """bytes until this place of the curve, and network seconds; None where a seed's were not recorded."""
    names = {name: f"network_seconds_{name}" for name in LINKS}
    if any(len(point) < 4 for point in seeds):
        return dict.fromkeys(("bytes", *names.values()))
    nbytes, messages = (statistics.mean(point[column] for point in seeds) for column in (2, 3))
    seconds = {names[name]: messages * link.alpha + nbytes * link.beta for name, link in LINKS.items()}
    return {"bytes": nbytes, **seconds}


def write(folder: Path, found: Sequence[dict[str, Any]], *, ways: Sequence[str]) -> None:
    """folder/convergence-curves.csv, and .png: of these ways, without clipping, one picture a task and optimizer."""
    rows = points(found)
    with (folder / "convergence-curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    _draw(folder / "convergence-curves.png", [row for row in rows if row["way"] in ways and not row["clip"]])


def _draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    pictures = dict.fromkeys((row["task"], row["optimizer"], row["ranks"], row["steps"]) for row in rows)
    if not pictures:
        return
    columns = ("step", "bytes") if all(row["bytes"] is not None for row in rows) else ("step",)
    figure = Figure(figsize=(5.5 * len(columns), 3 * len(pictures)), layout="constrained")
    for title, pair in zip(pictures, figure.subplots(len(pictures), len(columns), squeeze=False), strict=True):
        here = [row for row in rows if (row["task"], row["optimizer"], row["ranks"], row["steps"]) == title]
        for axes, across in zip(pair, columns, strict=True):
            for way, density in dict.fromkeys((row["way"], row["density"]) for row in here):
                line = [row for row in here if (row["way"], row["density"]) == (way, density)]
                xs = [row[across] for row in line]
                (drawn,) = axes.plot(xs, [row["mean"] for row in line], label=f"{way}, {density:g}")
                low, high = ([row[name] for row in line] for name in ("least", "most"))
                axes.fill_between(xs, low, high, color=drawn.get_color(), alpha=0.15)
            axes.set_xlabel(across)
            axes.grid(alpha=0.3)
            axes.set_xscale("log" if across == "bytes" else "linear")
        pair[0].set_title("{}, {}, {} ranks, {} steps".format(*title))
        pair[0].legend(fontsize="small")
    figure.savefig(path, dpi=80)
