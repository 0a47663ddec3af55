"""What the native kernels were to reach, beside what the records say; the marks stand in bench/published.toml.

Why a row falls short is told there in words, and here with the figures of the same record that show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.headlines.headline import MEASURED, Headline, Rows
from bench.published import published

LEVELS = ("c", "avx2", "avx512")
"""Of a row, slowest first; the last that ran is what is in use."""


class Held(NamedTuple):
    """A figure, and the most that it was to be."""

    what: str
    n: int
    figure: float
    most: float

    @property
    def short(self) -> bool:
        """Whether it is more."""
        return self.figure > self.most


def calls(rows: Rows) -> Headline:
    """Whole calls beside MPI's dense one."""
    marks = published()["marks"]["calls"]
    asked = [row for row in rows if (row["P"], row["density"]) == (marks["ranks"], marks["density"])]
    mine = [row for row in asked if row["select_ms"] is not None and str(row["n"]) in marks]
    held = [Held(row["algorithm"], row["n"], row["x_mpi"], _mark_of(marks, row)) for row in mine]
    told = []
    for n in dict.fromkeys(one.n for one in held if one.short):
        whole, own = zip(
            *((row["whole_ms"], row["select_ms"] + row["put_ms"]) for row in mine if row["n"] == n), strict=True
        )
        dense = next(row["whole_ms"] for row in asked if row["n"] == n and row["algorithm"] == "mpi4py Allreduce")
        told.append(
            f"At n = {n:,} MPI's takes {dense:.2f} ms, and the sparse calls {min(whole):.2f} to {max(whole):.2f}, of "
            f"which {min(own):.2f} to {max(own):.2f} are selecting and putting back."
        )
    return _headline(
        f"Sparse calls beside MPI's dense allreduce over shared memory, {marks['ranks']} ranks, {marks['density']:.0%}",
        held,
        unit="×",
        record="collectives",
        words="Whole calls with their selection, in units of `MPI_Allreduce` of all entries.",
        why=[published()["why"]["calls"], *told],
    )


def topk(rows: Rows) -> Headline:
    """Read passes of a selection."""
    marks = dict(published()["marks"]["topk"])
    misled = marks.pop("misled")
    plain = [row for row in rows if row["what"] == "top-k" and str(row["n"]) in marks]
    held = [Held(f"{row['what']}, k = {row['k']:,}", row["n"], row["sweeps"], marks[str(row["n"])]) for row in plain]
    held += [
        Held(row["what"], row["n"], row["sweeps"], misled * min(marks.values()))
        for row in rows
        if row["what"].startswith("top-k, ")
    ]
    shown = [row for row in plain if row["k"] * 100 == row["n"]]
    told = ", ".join(
        f"{1e6 * row['ours_ms'] / row['n']:.2f} ns at n = {row['n']:,} (a read pass: "
        f"{1e6 * row['ours_ms'] / row['sweeps'] / row['n']:.2f})"
        for row in shown
    )
    return _headline(
        "Exact top-k in read passes",
        held,
        record="compress",
        words="One thread on a CPU core.",
        why=[published()["why"]["topk"], f"An element takes {told}."],
    )


def steps(levels: Rows) -> Headline:
    """Error feedback and selection in one pass."""
    rows = [row for row in levels if row["what"] == "step"]
    told = ", ".join(
        f"{_ns(row) * _best(row):.2f} ns at n = {row['n']:,} (an in-place add: {_ns(row):.2f})" for row in rows
    )
    return _headline(
        "An error-feedback step in units of an in-place add",
        _by_level(levels, published()["marks"]["step"]),
        unit="×",
        record="compress",
        words="Error feedback, selection and residual, in units of one in-place add of the gradient; the best level.",
        why=[published()["why"]["step"], f"An element takes {told}."],
    )


def merge(levels: Rows) -> Headline:
    """Nanoseconds an entry."""
    marks = {n: {"merge and cut": most} for n, most in published()["marks"]["merge"].items()}
    adds = [row for row in levels if row["what"] == "add" and str(row["n"]) in marks]
    told = "; ".join(
        f"the sum alone takes {_best(row):.2f} ns at best, {row['c']:.2f} in plain C (n = {row['n']:,})" for row in adds
    )
    return _headline(
        "Merging and cutting, ns an input entry",
        _by_level(levels, marks),
        record="compress",
        words="Two vectors of 1 % each, cut to as many; the best level.",
        why=[published()["why"]["merge"], f"Of that {told}."],
    )


def _by_level(levels: Rows, marks: Mapping[str, Mapping[str, float]]) -> list[Held]:
    """The best level's figure of what has a mark."""
    return [
        Held(row["what"], row["n"], _best(row), most)
        for row in levels
        if (most := marks.get(str(row["n"]), {}).get(row["what"])) is not None
    ]


def _headline(
    title: str, held: Sequence[Held], *, record: str, words: str, why: Sequence[str], unit: str = ""
) -> Headline:
    """why: told where a mark is missed."""
    short = [f"{one.what} at n = {one.n:,}" for one in held if one.short]
    details = [
        {
            "what": one.what,
            "n": f"{one.n:,}",
            "here": f"{one.figure:.2f}{unit}",
            "mark": f"≤ {one.most:g}{unit}",
            "verdict": "falls short" if one.short else "reached",
        }
        for one in held
    ]
    return Headline(
        title=title,
        published="(ours: all)",
        ours=f"{len(held) - len(short)} of {len(held)} marks",
        how=MEASURED,
        record=record,
        reached=not short,
        shortfall=" ".join([words, *([f"Above the mark: {'; '.join(short)}.", *why] if short else [])]),
        details=details,
    )


def _best(row: Mapping[str, Any]) -> float:
    return float(min(row[level] for level in LEVELS if row[level] is not None))


def _ns(row: Mapping[str, Any]) -> float:
    """An element's share of the unit."""
    return float(1e6 * row["unit_ms"] / row["n"])


def _mark_of(marks: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    mine = marks[str(row["n"])]
    return float(mine.get(row["algorithm"], mine["every"]))
