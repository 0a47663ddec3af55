"""What a benchmark leaves behind: its rows, the circumstances that they are from, and a picture of them."""

from __future__ import annotations

import csv
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sparse_collectives.prediction.plain_table import table

Row = Mapping[str, Any]

SAMPLES = "_samples"
"""Ends the name of a row's list of single measurements."""
BEGAN = "began"
"""Of the circumstances: when the benchmark did, so that the record tells how many seconds it took."""


def machine() -> dict[str, str]:
    """What the numbers were measured on, and how busy it was."""
    return {
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def record(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    *,
    labels: Sequence[str],
    values: Sequence[str],
    facts: Mapping[str, Any],
    against: str,
    draw: Callable[[Path], None] | None = None,
    **more: Any,
) -> None:
    """Writes folder/name.csv (the rows), .json (with the circumstances, single measurements, and `more`) and .png.

    labels: the columns that say what a row is. values: those whose bars are drawn. facts: the circumstances, asked for
    before the benchmark made the machine busy. against: what the numbers are compared with; printed. draw: makes
    another picture. A list `x_samples` of a row becomes the columns x_p20, x_p50 and x_p80, and stands in the .json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = [with_quantiles(row) for row in rows]
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in table for column in row)))
        writer.writeheader()
        writer.writerows(table)
    samples = [{key: value for key, value in row.items() if key.endswith(SAMPLES)} for row in rows]
    content = {"circumstances": {**facts, "seconds": _since(facts[BEGAN])}, "against": against, "rows": table, **more}
    content |= {"samples": samples} if any(samples) else {}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (draw or partial(_bars, name=name, rows=table, labels=labels, values=values))(folder / f"{name}.png")
    print(f"compared with: {against}\nwritten: {folder / name}.csv, .json, .png", flush=True)


def as_text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Some columns of the rows, as a table to print."""
    return table(columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _since(began: str) -> int:
    return round((datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds())


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """What 20, 50 and 80 % of them stay below."""
    if len(samples) == 1:
        return (samples[0],) * 3
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return fifths[0], statistics.median(samples), fifths[3]


def with_quantiles(row: Row) -> dict[str, Any]:
    """The row with x_p20, x_p50 and x_p80 in place of every list x_samples."""
    plain = {key: value for key, value in row.items() if not key.endswith(SAMPLES)}
    for key, value in row.items():
        if key.endswith(SAMPLES):
            names = (f"{key.removesuffix(SAMPLES)}_p{percent}" for percent in (20, 50, 80))
            plain |= dict(zip(names, quantiles(value), strict=True))
    return plain


def _bars(path: Path, *, name: str, rows: Sequence[Row], labels: Sequence[str], values: Sequence[str]) -> None:
    """A bar for each row and value; the axis is logarithmic where they differ much."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.2 * len(rows) * len(values)), layout="constrained")
    axes = figure.subplots()
    thickness = 0.8 / len(values)
    for place, value in enumerate(values):
        heights = [row[value] or 0.0 for row in rows]
        axes.barh([i + place * thickness for i in range(len(rows))], heights, thickness, label=value)
    axes.set_yticks(
        [i + 0.4 - thickness / 2 for i in range(len(rows))],
        [
            ", ".join(f"{row[label]:,}" if isinstance(row[label], int) else str(row[label]) for label in labels)
            for row in rows
        ],
        fontsize="small",
    )
    axes.invert_yaxis()
    drawn = [row[value] for row in rows for value in values if row[value]]
    if max(drawn, default=0) > 50 * min(drawn, default=0) > 0:
        axes.set_xscale("log")
    axes.set_title(name)
    axes.legend()
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=100)
