"""How far algorithms are behind dense, by density: a panel for each task, optimizer and number of ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.convergence.tasks import TASKS
from bench.record import Row

DRAWN = {"gtopk": "o-", "topk-allgather": "s--", "topk-dsa": "^:", "oktopk": "x-.", "spardl": "v-"}
"""Algorithms, and how their lines look."""
FEWEST = 2  # densities of a line
PLACES, MARKS = (0.1, 0.01, 0.001), (-5, -2, -1, 0, 1, 2, 5, 10, 20, 30)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Means over seeds, and bars from the best to the worst seed; the tasks' own steps, without clipping.

    rows: of the record. The picture is empty where no algorithm was tried at several densities.
    """
    from matplotlib.figure import Figure

    lines = _lines(rows)
    across = sorted({ranks for _, ranks in lines})
    down = sorted({panel for panel, _ in lines})
    figure = Figure(figsize=(1 + 3.5 * max(1, len(across)), 1 + 2.4 * max(1, len(down))), layout="constrained")
    grid = figure.subplots(max(1, len(down)), max(1, len(across)), squeeze=False, sharey="row")
    for axes in grid.flat:
        axes.set_visible(False)
    for (panel, ranks), ways in lines.items():
        axes = grid[down.index(panel)][across.index(ranks)]
        axes.set_visible(True)
        for way, places in ways.items():
            number = list(DRAWN).index(way)
            densities = [density * (1 + 0.04 * (number - len(DRAWN) / 2)) for density in places]  # bars side by side
            behind, least, most = zip(*places.values(), strict=True)
            bars = [
                [max(0.0, mean - low) for mean, low in zip(behind, least, strict=True)],
                [max(0.0, high - mean) for mean, high in zip(behind, most, strict=True)],
            ]
            style = {"fmt": DRAWN[way], "color": f"C{number}", "markersize": 4, "linewidth": 1, "capsize": 2}
            axes.errorbar(densities, behind, bars, label=way, **style)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(PLACES, [f"{100 * density:g} %" for density in PLACES])
        axes.set_yscale("symlog", linthresh=2)
        axes.set_yticks(MARKS, [f"{mark:g}" for mark in MARKS])
        axes.set_title(f"{', '.join(panel)}; {ranks} ranks", fontsize="small")
        axes.set_xlabel("density", fontsize="small")
        axes.set_ylabel("% above dense" if TASKS[panel[0]].text else "points behind dense", fontsize="small")
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
    found = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=len(found))
    figure.savefig(path, dpi=80)


def _lines(rows: Sequence[Row]) -> dict[Any, dict[str, dict[float, tuple[float, float, float]]]]:
    """{((task, optimizer), ranks): {way: {density: behind in the mean, of the best and of the worst seed}}}."""
    found: dict[Any, dict[str, dict[float, tuple[float, float, float]]]] = {}
    whole = {_place(row): row["mean"] for row in rows if row["way"] == "dense"}
    for row in rows:
        text = TASKS[row["task"]].text
        if row["way"] not in DRAWN or row["clip"] or row["steps"] != TASKS[row["task"]].steps or row["behind"] is None:
            continue
        unit = 100 / whole[_place(row)] if text else -1.0
        ends = sorted(row["behind"] + unit * (row[end] - row["mean"]) for end in ("least", "most"))
        place = ((row["task"], row["optimizer"]), row["ranks"])
        found.setdefault(place, {}).setdefault(row["way"], {})[row["density"]] = (row["behind"], *ends)
    several = {
        place: {way: dict(sorted(ways[way].items())) for way in DRAWN if len(ways.get(way, ())) >= FEWEST}
        for place, ways in found.items()
    }
    return {place: ways for place, ways in several.items() if ways}


def _place(row: Row) -> tuple[Any, ...]:
    return row["task"], row["optimizer"], row["clip"], row["ranks"], row["steps"]
