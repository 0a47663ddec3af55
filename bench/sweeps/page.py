"""What docs/results.md says of the sweeps: made of the record and the published figures alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.published import published
from bench.sweeps.delta import KEPT

Row = Mapping[str, Any]


def introduction(record: Mapping[str, Any]) -> str:
    """What was measured, and what the settings share."""
    setup, rows = record["setup"], record["rows"]
    return (
        "\n## What decides how well a sparse training learns?\n\n"
        f"One thing at a time, measured on a small task: {setup['task']}, SGD, {setup['steps']} steps, "
        f"{setup['ranks']} {setup['ranks_are']} ranks in one process, {rows[0]['seeds']} seeds. What is not swept is "
        "ours: gTop-k, all that is cut returns to a residual, momentum before the selection, no warm-up. The learning "
        "rate is dense's throughout, so without momentum the steps are much shorter, and with it at both places much "
        f"longer. Dense has {rows[0]['dense']:.1f} %. A seed that diverged counts as 0 %. Larger models and longer "
        "trainings may differ.\n"
    )


def accuracies(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """One a setting."""
    return [
        {
            "sweep": row["sweep"],
            "setting": row["setting"],
            "density": f"{row['density']:.1%}",
            "accuracy, %": f"{row['mean']:.1f}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
            "of the seeds": f"{row['least']:.1f} … {row['most']:.1f}",
            "points behind dense": f"{row['dense'] - row['mean']:.1f}",
        }
        for row in record["rows"]
    ]


def readings(record: Mapping[str, Any]) -> str:
    """What each sweep shows, setting by setting, without a verdict where the seeds overlap."""
    rows = record["rows"]
    lines = ["\nBeside ours of the same sweep and density, in points (≈: the seeds of both overlap):\n"]
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        mine = [row for row in rows if row["sweep"] == sweep]
        found = [_beside(row, _ours(mine, row)) for row in mine if "ours" not in row["setting"]]
        if found:
            lines.append(f"- {sweep}: {'; '.join(found)}.")
    return "\n".join(lines) + "\n"


def assumption(record: Mapping[str, Any]) -> str:
    """Whether δ ≤ 1 held."""
    claim = published()["claims"]["gtopk_assumption"]
    points, most = record["delta"], claim["most"]
    above = {kept: sum(point[kept] > most for point in points) for kept in KEPT}
    told = ", ".join(f"{kept}: {count} of {len(points)}" for kept, count in above.items())
    return (
        f"\nδ = ‖s − kept‖² / E‖s − RandK(s)‖² through training, s the sum of what the ranks have accumulated. "
        f"Published: δ ≤ {most:g} at every step is assumed ({published()['sources'][claim['source']]}). Here, observed "
        f'every few steps of ours at each density and seed, above {most:g}: {told}. "top-k of the sum" cannot be; '
        '"sum of top-k" is every rank\'s own selection, added; "gtopk" what the exchange returned.\n'
    )


def deltas(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """By density: the largest δ of any step and seed, and the mean of the last step that was observed."""
    points = record["delta"]
    last = max(point["step"] for point in points)
    found = []
    for density in dict.fromkeys(point["density"] for point in points):
        mine = [point for point in points if point["density"] == density]
        ends = [point for point in mine if point["step"] == last]
        cells = {f"{kept}: most, last": _most_and_last(mine, ends, kept) for kept in KEPT}
        found.append({"density": f"{density:.1%}", **cells})
    return found


def _most_and_last(points: Sequence[Row], ends: Sequence[Row], kept: str) -> str:
    return f"{max(point[kept] for point in points):.3f}, {sum(end[kept] for end in ends) / len(ends):.3f}"


def _ours(rows: Sequence[Row], like: Row) -> Row:
    return next(row for row in rows if "ours" in row["setting"] and row["density"] == like["density"])


def _beside(row: Row, ours: Row) -> str:
    overlap = row["most"] >= ours["least"] and ours["most"] >= row["least"]
    sign = "≈ " if overlap else ""
    return f"{row['setting']} at {row['density']:.1%} {sign}{row['mean'] - ours['mean']:+.1f}"
