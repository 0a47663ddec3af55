"""What is known of how models learn with an exchange: from the record of `python -m bench convergence`, kept here.

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
    """least, most: points of accuracy behind dense over the tasks, of text percent of perplexity, means of seeds.

    tasks: their names. seeds: of the task with the fewest.
    """

    least: float
    most: float
    tasks: tuple[str, ...]
    seeds: int


def known(optimizer: str, algorithm: str, density: float, wire: str) -> Known | None:
    """Of an exchange as it is recommended for that optimizer; None where nobody measured it."""
    asked = {"optimizer": optimizer, "algorithm": algorithm, "density": density, "wire": wire}
    rows = [row for row in _record() if all(row[name] == value for name, value in asked.items())]
    if not rows:
        return None
    behind = [row["behind"] for row in rows]
    tasks = tuple(dict.fromkeys(row["task"] for row in rows))
    return Known(min(behind), max(behind), tasks, min(row["seeds"] for row in rows))


def within_a_point(found: Known) -> bool:
    """On the worst of its tasks, at most `MOST_BEHIND` behind dense."""
    return found.most <= MOST_BEHIND


def in_a_column(found: Known | None) -> str:
    """Points behind dense: "0.3", "-0.6…1.1", or "?" where it was not measured."""
    if found is None:
        return "?"
    least, most = f"{found.least:.1f}", f"{found.most:.1f}"
    return least if least == most else f"{least}…{most}"


def in_words(found: Known | None, optimizer: str) -> str:
    """A line of the advice."""
    if found is None:
        return f"How this exchange learns with {optimizer} was not measured: compare the first epochs with dense ones."
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    return (
        f"Time is not accuracy: with {optimizer}, small models of {', '.join(found.tasks)} were {in_a_column(found)} "
        f"points behind dense (short trainings, {seeds}): compare the first epochs with dense ones."
    )


@cache
def _record() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(files(__package__).joinpath("accuracy.json").read_text())["rows"]
    return rows
