"""What a headline is: one claim beside what a record says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
SIMULATED = "simulated"
MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One claim. record: which .json it is from. how: simulated, measured. reached: as the claim has it, or better.

    shortfall: why not, where it falls short; or what the figure does not say. details: a table of its own.
    published: the claim, a paper's, or (ours: what we ask of it). source: of a paper's.
    """

    title: str
    published: str
    ours: str
    how: str
    record: str
    reached: bool
    shortfall: str = ""
    details: Sequence[Mapping[str, str]] = ()
    source: str = ""


def times(values: Sequence[float]) -> str:
    """Their range, as factors."""
    return f"{min(values):.1f}–{max(values):.1f}×"


def detailed(rows: Rows, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """A table of rows. columns: by head, how a row is told, such as "{compute_ms:.0f}"."""
    return [{head: form.format_map(row) for head, form in columns.items()} for row in rows]
