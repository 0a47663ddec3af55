"""Accuracy measured for training with an exchange: the record of `python -m bench convergence`.

`accuracy.json` is written by that command (`--accuracy FILE`), never by hand.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

MOST_BEHIND = 1.0
"""Points of accuracy, of text percent of perplexity: what is known to lose more is not advised unasked."""


class Known(NamedTuple):
    """Measured accuracy of an exchange.

    least, most: over the tasks, points of accuracy behind dense (for text: percent of perplexity), means of seeds.
    tasks: their names. seeds: of the task with the fewest. ranks: number of ranks that trained each task.
    """

    least: float
    most: float
    tasks: tuple[str, ...]
    seeds: int
    ranks: tuple[int, ...]


def known(
    optimizer: str, algorithm: str, density: float, wire: str, ranks: int, *, sends: str = "updates"
) -> Known | None:
    """Measured accuracy of an exchange with the recommended settings for that optimizer; None if it was not measured.

    For each task, uses the measured number of ranks nearest to `ranks` by ratio, and the larger of two that are equally
    near, because most tasks lose more on more ranks. Of the trainings on that many ranks it uses the longest: residuals
    wait as many steps in a short training, which is a larger share of it.
    """
    asked = {"optimizer": optimizer, "algorithm": algorithm, "density": density, "wire": wire, "sends": sends}
    rows = [row for row in _record() if all(row[name] == value for name, value in asked.items())]
    if not rows:
        return None
    tasks = tuple(dict.fromkeys(row["task"] for row in rows))
    taken = [_nearest([row for row in rows if row["task"] == task], ranks) for task in tasks]
    behind = [row["behind"] for row in taken]
    return Known(
        min(behind), max(behind), tasks, min(row["seeds"] for row in taken), tuple(row["ranks"] for row in taken)
    )


def within_a_point(found: Known) -> bool:
    """Whether the worst of its tasks is at most `MOST_BEHIND` behind dense."""
    return found.most <= MOST_BEHIND


def in_a_column(found: Known | None) -> str:
    """Points behind dense: "0.3", "-0.6…1.1", or "?" where it was not measured."""
    if found is None:
        return "?"
    least, most = f"{found.least:.1f}", f"{found.most:.1f}"
    return least if least == most else f"{least}…{most}"


def on_ranks(found: Known) -> str:
    """Numbers of ranks over the tasks: "on 2 and 8 ranks"."""
    return f"on {' and '.join(map(str, sorted(set(found.ranks))))} ranks"


def in_words(found: Known | None, optimizer: str, ranks: int) -> str:
    """Line of the advice about accuracy. ranks: the user's."""
    if found is None:
        return f"How this exchange learns with {optimizer} was not measured: compare the first epochs with dense ones."
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    others = set(found.ranks) != {ranks}
    return (
        f"Time is not accuracy: with {optimizer}, small models {_models(found)}"
        f"{f', the nearest to your {ranks},' if others else ''} were {in_a_column(found)} points behind dense "
        f"(short trainings, {seeds}): compare the first epochs with dense ones."
    )


def _models(found: Known) -> str:
    """Tasks by number of ranks: "of cnn, text on 2 ranks and of vit on 8 ranks"."""
    trained = {
        size: [task for task, own in zip(found.tasks, found.ranks, strict=True) if own == size]
        for size in sorted(set(found.ranks))
    }
    return " and ".join(f"of {', '.join(tasks)} on {size} ranks" for size, tasks in trained.items())


def _nearest(rows: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """The row of one task whose number of ranks is nearest, and whose training is longest."""
    return min(rows, key=lambda row: (_ratio(row["ranks"], ranks), -row["ranks"], -row["steps"]))


def _ratio(one: int, other: int) -> float:
    return max(one / other, other / one)


@cache
def _record() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(files(__package__).joinpath("accuracy.json").read_text())["rows"]
    return rows
