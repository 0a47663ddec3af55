"""How far ways are behind dense, by density and by bytes: a panel for each task, optimizer and number of ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.convergence.tasks import TASKS
from bench.record import Row

DRAWN = {"gtopk": "o-", "topk-allgather": "s--", "topk-dsa": "^:", "oktopk": "x-.", "spardl": "v-"}
"""Algorithms, and how their lines look."""
WHOLE = {"powersgd": "P", "dense-int8": "D", "dense bf16": "h", "diloco": "*"}
"""Ways without a density, beside them where bytes are what counts."""
PLACES, MARKS = (0.1, 0.01, 0.001), (-5, -2, -1, 0, 1, 2, 5, 10, 20, 30)
Places = dict[float, tuple[float, float, float]]


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Means over seeds, and bars from the best to the worst seed; the tasks' own steps, without clipping.

    By density at path, by bytes beside it, as NAME-bytes.png. rows: of the record. A picture is empty where no
    algorithm was tried at several densities.
    """
    _drawn(path, _lines(rows, DRAWN, "density"), _by_density)
    _drawn(path.with_stem(f"{path.stem}-bytes"), _lines(rows, DRAWN | WHOLE, "bytes_a_step"), _by_bytes)


def _drawn(path: Path, lines: dict[Any, dict[str, Places]], scaled: Callable[[Any, Places, int], list[float]]) -> None:
    from matplotlib.figure import Figure

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
            number = list(DRAWN | WHOLE).index(way)
            behind, least, most = zip(*places.values(), strict=True)
            bars = [
                [max(0.0, mean - low) for mean, low in zip(behind, least, strict=True)],
                [max(0.0, high - mean) for mean, high in zip(behind, most, strict=True)],
            ]
            style = {"color": f"C{number}", "markersize": 4, "linewidth": 1, "capsize": 2}
            axes.errorbar(scaled(axes, places, number), behind, bars, label=way, fmt=(DRAWN | WHOLE)[way], **style)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=2)
        axes.set_yticks(MARKS, [f"{mark:g}" for mark in MARKS])
        axes.set_title(f"{', '.join(panel)}; {ranks} ranks", fontsize="small")
        axes.set_ylabel("% above dense" if TASKS[panel[0]].text else "points behind dense", fontsize="small")
        axes.grid(alpha=0.3)
    found = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=80)


def _by_density(axes: Any, places: Places, number: int) -> list[float]:
    """Where points stand, bars side by side; from many entries to few."""
    axes.set_xscale("log")
    axes.set_xlim(0.15, 0.0007)
    axes.set_xticks(PLACES, [f"{100 * place:g} %" for place in PLACES])
    axes.set_xlabel("density", fontsize="small")
    return [place * (1 + 0.04 * (number - len(DRAWN) / 2)) for place in places]


def _by_bytes(axes: Any, places: Places, number: int) -> list[float]:
    """Kilobytes of the busiest rank in a step, a mean over the training, with what a warm-up sends."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    del number
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("kB a step", fontsize="small")
    return [place / 1e3 for place in places]


def _lines(rows: Sequence[Row], drawn: dict[str, str], by: str) -> dict[Any, dict[str, Places]]:
    """{((task, optimizer), ranks): {way: {density or bytes: behind in the mean, of the best and of the worst seed}}}.

    Only panels with an algorithm at two densities or more.
    """
    found: dict[Any, dict[str, Places]] = {}
    whole = {_place(row): row["mean"] for row in rows if row["way"] == "dense"}
    for row in rows:
        text = TASKS[row["task"]].text
        if row["way"] not in drawn or row["clip"] or row["steps"] != TASKS[row["task"]].steps or row["behind"] is None:
            continue
        unit = 100 / whole[_place(row)] if text else -1.0
        ends = sorted(row["behind"] + unit * (row[end] - row["mean"]) for end in ("least", "most"))
        place = ((row["task"], row["optimizer"]), row["ranks"])
        found.setdefault(place, {}).setdefault(row["way"], {})[row[by]] = (row["behind"], *ends)
    fewest = dict.fromkeys(DRAWN, 2) | dict.fromkeys(WHOLE, 1)
    kept = {
        place: {way: dict(sorted(ways[way].items())) for way in drawn if len(ways.get(way, ())) >= fewest[way]}
        for place, ways in found.items()
    }
    return {place: ways for place, ways in kept.items() if any(way in DRAWN for way in ways)}


def _place(row: Row) -> tuple[Any, ...]:
    return row["task"], row["optimizer"], row["clip"], row["ranks"], row["steps"]
