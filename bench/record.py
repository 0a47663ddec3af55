"""One form for all benchmarks: a command line with --full and --output, and a record of rows and circumstances."""

import argparse
import csv
import json
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = Mapping[str, Any]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
QUICK = RESULTS / "quick"
MADE = ("bench/results", "docs", "*.md")
"""What benchmarks and `hatch run results` write: it says nothing of the code that was measured."""

FIRST_WIDTH = 26
"""Characters of a printed table's first column."""
SAMPLES = "_samples"
"""Ends the name of a row's list of single measurements."""
BEGAN = "began"
"""Of the circumstances: when the benchmark did, so that the record tells how many seconds it took."""


def parser_of(name: str, doc: str | None, *, full: str) -> argparse.ArgumentParser:
    """For `python -m bench NAME`, with the options that every benchmark has.

    doc: the module's, of which the first line is shown. full: what --full means here.
    """
    summary = (doc or "").strip().partition("\n")[0]
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=summary)
    made.add_argument("--full", action="store_true", help=full)
    made.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"where {name}.csv, .json and .png are written; default bench/results/quick, with --full bench/results",
    )
    return made


def asked(parser: argparse.ArgumentParser, argv: Sequence[str], **defaults: tuple[Any, Any]) -> argparse.Namespace:
    """The options, with `name`, the benchmark's, and `facts`: the circumstances.

    These are the machine, the command, all options, the commit, the seeds, and the time.

    defaults: by option, what it is where it was not given: in the quick form, and with --full.
    """
    options = parser.parse_args(argv)
    options.output = options.output or (RESULTS if options.full else QUICK)
    for name, (quick, full) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, full if options.full else quick)
    facts: dict[str, Any] = {**machine(), "command": f"{parser.prog} {shlex.join(argv)}".strip(), "commit": commit()}
    facts["options"] = {name: _plain(value) for name, value in vars(options).items() if name != "output"}
    options.facts = facts | {"seeds": _seeds(options), BEGAN: datetime.now(UTC).isoformat(timespec="seconds")}
    options.name = parser.prog.rpartition(" ")[2]
    return options


def _seeds(options: argparse.Namespace) -> list[int] | str:
    """Those that are used; where none is asked for, all that is drawn is drawn from a constant."""
    if hasattr(options, "seed"):
        return [options.seed]
    return list(range(options.seeds)) if hasattr(options, "seeds") else "constant, in the code"


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | tuple | None) else str(value)


def commit() -> str:
    """The tree's, with a + where its code differs from it; "unknown" outside of git."""
    code = ["--", ".", *(f":(exclude){path}" for path in MADE)]
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", *code) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607 - of whoever runs it by hand


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
    options: argparse.Namespace,
    rows: Iterable[Row],
    *,
    labels: Sequence[str],
    values: Sequence[str],
    against: str,
    shown: Sequence[str] = (),
    name: str = "",
    draw: Callable[[Path, Sequence[Row]], None] | None = None,
    **more: Any,
) -> list[Row]:
    """Prints each row as it comes, and writes NAME.csv (the rows), .json and .png; returns the rows.

    The .json has also the circumstances, single measurements, and `more`.
    options: as `asked` gave them, before the benchmark made the machine busy. labels: the columns that say what a row
    is. values: those whose bars are drawn. against: what the numbers are compared with; printed. shown: columns that
    are printed, if not labels and values. name: other than the benchmark's. draw: makes another picture of the rows. A
    list `x_samples` of a row becomes the columns x_p20, x_p50 and x_p80, and stands in the .json.
    """
    folder, name = options.output, name or options.name
    rows = list(told(rows, shown or (*labels, *values)))
    folder.mkdir(parents=True, exist_ok=True)
    table = [with_quantiles(row) for row in rows]
    write_table(folder / f"{name}.csv", table)
    samples = [{key: value for key, value in row.items() if key.endswith(SAMPLES)} for row in rows]
    circumstances = {**options.facts, "seconds": _since(options.facts[BEGAN])}
    content = {"circumstances": circumstances, "against": against, "rows": table, **more}
    content |= {"samples": samples} if any(samples) else {}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (draw or partial(_bars, name=name, labels=labels, values=values))(folder / f"{name}.png", table)
    print(f"compared with: {against}\nwritten: {folder / name}.csv, .json, .png", flush=True)
    return rows


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as a .csv file, whose columns are those of any row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)


def told(rows: Iterable[Row], columns: Sequence[str]) -> Iterator[Row]:
    """The rows, each printed when it is there: some columns, the first flush left, the others flush right."""
    widths = [FIRST_WIDTH, *(max(len(column), 9) for column in columns[1:])]
    print(_line(columns, widths), flush=True)
    for row in rows:
        print(_line([_cell(row.get(column)) for column in columns], widths), flush=True)
        yield row


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


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


def _bars(path: Path, rows: Sequence[Row], *, name: str, labels: Sequence[str], values: Sequence[str]) -> None:
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
