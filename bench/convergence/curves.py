"""Scores on the way: against steps, bytes of the busiest rank, and seconds that a network takes for them.

Bytes are those that were counted until then, since a warm-up sends most of them first. Trainings of the first records,
of which they were not written down, have none.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.convergence.training import LINKS
from bench.record import write_table

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
    """Writes folder/convergence-curves.csv."""
    write_table(folder / "convergence-curves.csv", points(found))
