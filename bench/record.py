"""What a benchmark leaves behind with --output DIR: its rows, the machine they are from, and a picture of them."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = Mapping[str, Any]


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
    facts: Mapping[str, str],
    **more: Any,
) -> None:
    """Writes folder/name.csv, .json (with the machine, and `more`) and .png.

    labels: the columns that say what a row is. values: those whose bars are drawn. facts: `machine()`, asked before
    the benchmark made it busy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    content = {"machine": dict(facts), "rows": [dict(row) for row in rows], **more}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    _draw(folder / f"{name}.png", name, rows, labels, values)


def _draw(path: Path, name: str, rows: Sequence[Row], labels: Sequence[str], values: Sequence[str]) -> None:
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
    if max(drawn) > 50 * min(drawn) > 0:
        axes.set_xscale("log")
    axes.set_title(name)
    axes.legend()
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=100)
