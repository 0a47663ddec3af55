"""What the native kernels were to reach, beside what the records say; the marks stand in bench/published.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.headline import MEASURED, Headline, Rows
from bench.published import published

LEVELS = ("c", "avx2", "avx512")
"""Of a row, slowest first; the last that ran is what is in use."""


def kernel_calls(rows: Rows) -> Headline:
    """Whole calls beside MPI's dense one."""
    marks = published()["marks"]["calls"]
    mine = [row for row in rows if (row["P"], row["density"]) == (marks["ranks"], marks["density"])]
    found = [
        (row["algorithm"], row["n"], row["x_mpi"], _mark_of(marks[str(row["n"])], row["algorithm"]))
        for row in mine
        if row["select_ms"] is not None and str(row["n"]) in marks
    ]
    return _headline(
        f"Sparse calls beside MPI's dense allreduce over shared memory, {marks['ranks']} ranks, {marks['density']:.0%}",
        found,
        "×",
        "collectives",
        "Whole calls with their selection, in units of `MPI_Allreduce` of all entries.",
    )


def kernel_topk(rows: Rows) -> Headline:
    """Read passes of a selection."""
    marks = dict(published()["marks"]["topk"])
    misled = marks.pop("misled")
    found = [
        (f"{row['what']}, k = {row['k']:,}", row["n"], row["sweeps"], marks[str(row["n"])])
        for row in rows
        if row["what"] == "top-k" and str(row["n"]) in marks
    ]
    found += [
        (row["what"], row["n"], row["sweeps"], misled * min(marks.values()))
        for row in rows
        if row["what"].startswith("top-k, ")
    ]
    return _headline("Exact top-k in read passes", found, "", "compress", "One thread on a CPU core.")


def kernel_steps(levels: Rows) -> Headline:
    """Error feedback and selection in one pass."""
    found = _by_level(levels, published()["marks"]["step"])
    words = "Error feedback, selection and residual, in units of one in-place add of the gradient; the best level."
    return _headline("An error-feedback step in units of an in-place add", found, "×", "compress", words)


def kernel_merge(levels: Rows) -> Headline:
    """Nanoseconds an entry."""
    marks = {n: {"merge and cut": most} for n, most in published()["marks"]["merge"].items()}
    words = "Two vectors of 1 % each, cut to as many; the best level."
    return _headline("Merging and cutting, ns an input entry", _by_level(levels, marks), "", "compress", words)


def _by_level(levels: Rows, marks: Mapping[str, Mapping[str, float]]) -> list[tuple[str, int, float, float]]:
    """(what, n, the best level's figure, mark) of what has a mark."""
    return [
        (row["what"], row["n"], min(row[level] for level in LEVELS if row[level] is not None), most)
        for row in levels
        if (most := marks.get(str(row["n"]), {}).get(row["what"])) is not None
    ]


def _headline(
    title: str, found: Sequence[tuple[str, int, float, float]], unit: str, record: str, words: str
) -> Headline:
    """found: (what, n, figure, most that it was to be)."""
    short = [f"{what} at n = {n:,}" for what, n, figure, most in found if figure > most]
    details = [
        {
            "what": what,
            "n": f"{n:,}",
            "here": f"{figure:.2f}{unit}",
            "mark": f"≤ {most:g}{unit}",
            "": _told(figure, most),
        }
        for what, n, figure, most in found
    ]
    return Headline(
        title,
        "(ours)",
        "",
        f"{len(found) - len(short)} of {len(found)} marks",
        MEASURED,
        record,
        not short,
        words + (f" Above the mark: {'; '.join(short)}." if short else ""),
        details,
    )


def _told(figure: float, most: float) -> str:
    return "falls short" if figure > most else "reached"


def _mark_of(marks: Mapping[str, Any], algorithm: str) -> float:
    return float(marks.get(algorithm, marks["every"]))
