"""The best ways of each task, link and number of ranks, for pages."""

import math
from collections.abc import Sequence
from typing import Any

from bench.record import Row

PLACE = ("task", "P", "link")


def best_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One a task, number of ranks and link.

    bf16, powersgd, torch, ours, advised: rows, the fastest of several, None if none gets to the goal, or none is
    advised. over_bf16, over_powersgd, over_torch: how many times as long as ours those take; inf where only ours gets
    there, 0 where ours does not. late: how many times as long what is advised takes as the fastest of all; behind: as
    the fastest of torch's. advice: name of what is advised, even where it was not measured; tried: whether it was.
    """
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in PLACE), []).append(row)
    return [_best(mine) for mine in cells.values()]


def _best(rows: Sequence[Row]) -> dict[str, Any]:
    torch, ours = ([row for row in rows if row["library"] == library] for library in ("torch", "thinwire"))
    found = {
        "bf16": _fastest([row for row in torch if "bf16" in row["way"]]),
        "powersgd": _fastest([row for row in torch if "PowerSGD" in row["way"]]),
        "torch": _fastest(torch),
        "ours": _fastest(ours),
        "advised": _fastest([row for row in rows if row["advised"]]),
    }
    place = {name: rows[0][name] for name in (*PLACE, "goal")}
    place |= {"advice": rows[0].get("advice"), "tried": any(row["advised"] for row in rows)}
    for name, fastest in (("late", _fastest(rows)), ("behind", found["torch"])):
        place[name] = _over(found["advised"], fastest)
    return place | found | {f"over_{name}": _over(found[name], found["ours"]) for name in ("bf16", "powersgd", "torch")}


def _fastest(rows: Sequence[Row]) -> Row | None:
    return min((row for row in rows if row["seconds"] is not None), key=lambda row: row["seconds"], default=None)


def _over(other: Row | None, own: Row | None) -> float:
    if own is None:
        return 0.0
    return math.inf if other is None else float(other["seconds"] / own["seconds"])
