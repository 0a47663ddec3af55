"""Scores on the way: against steps, bytes of the busiest rank, and seconds that a network takes for them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("task", "optimizer", "clip", "ranks", "steps", "way", "density")


def points(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One a training and place of its curve, means over seeds. network seconds: predicted, without computing."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault(tuple(one[name] for name in NAMES), []).append(one)
    rows = []
    for labels, seeds in groups.items():
        networks = [name for name in seeds[0] if name.startswith("network_seconds")]
        for place in range(min(len(one["curve"]) for one in seeds)):
            step = seeds[0]["curve"][place][0]
            rows.append(
                dict(zip(NAMES, labels, strict=True))
                | {"step": step, "mean": statistics.mean(one["curve"][place][1] for one in seeds)}
                | {"least": min(one["curve"][place][1] for one in seeds)}
                | {"most": max(one["curve"][place][1] for one in seeds), "seeds": len(seeds)}
                | {"bytes": step * statistics.mean(one["bytes_a_step"] for one in seeds)}
                | {name: step * statistics.mean(one[name] for one in seeds) for name in networks}
            )
    return rows


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
    figure = Figure(figsize=(11, 3 * len(pictures)), layout="constrained")
    for title, pair in zip(pictures, figure.subplots(len(pictures), 2, squeeze=False), strict=True):
        here = [row for row in rows if (row["task"], row["optimizer"], row["ranks"], row["steps"]) == title]
        for axes, across in zip(pair, ("step", "bytes"), strict=True):
            for way, density in dict.fromkeys((row["way"], row["density"]) for row in here):
                line = [row for row in here if (row["way"], row["density"]) == (way, density)]
                xs = [row[across] for row in line]
                (drawn,) = axes.plot(xs, [row["mean"] for row in line], label=f"{way}, {density:g}")
                low, high = ([row[name] for row in line] for name in ("least", "most"))
                axes.fill_between(xs, low, high, color=drawn.get_color(), alpha=0.15)
            axes.set_xlabel(across)
            axes.grid(alpha=0.3)
        pair[1].set_xscale("log")
        pair[0].set_title("{}, {}, {} ranks, {} steps".format(*title))
        pair[0].legend(fontsize="small")
    figure.savefig(path, dpi=80)
