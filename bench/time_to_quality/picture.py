"""Bars of the seconds until the goal: a panel for each task, link and number of ranks."""

from collections.abc import Sequence
from pathlib import Path

from bench.record import Row

COLOURS = {"torch": "tab:gray", "thinwire": "tab:blue"}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Medians of seeds, from the fewest seconds to the most; the bar of a way that does not get there is missing."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        panels.setdefault((row["task"], row["P"]), {}).setdefault(row["link"], []).append(row)
    links = list(dict.fromkeys(row["link"] for row in rows))
    figure = Figure(figsize=(4.5 * len(links), 3.2 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(links), squeeze=False)
    for place, ((task, ranks), by_link) in zip(grid, panels.items(), strict=True):
        for axes, link in zip(place, links, strict=True):
            mine = sorted(by_link.get(link, ()), key=lambda row: row["seconds"] or float("inf"))
            if not mine:  # not measured: an empty axis has no logarithm
                axes.set_axis_off()
                continue
            names = [row["way"] + (" (advised)" if row["advised"] else "") for row in mine]
            axes.barh(names, [row["seconds"] or 0.0 for row in mine], color=[COLOURS[row["library"]] for row in mine])
            axes.invert_yaxis()
            axes.set_xscale("log")
            axes.tick_params(labelsize="small")
            axes.set_title(f"{task}, {ranks} ranks, {link}", fontsize="small")
            axes.set_xlabel("seconds until as good as DDP in bf16", fontsize="small")
            axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=80)
