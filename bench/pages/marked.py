"""The mechanism: a page marks where a block stands, and what is between the marks is made of the records.

<!-- figures: NAME, by `hatch run results` -->

...

<!-- end of figures -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.form import ROOT

Records = Mapping[str, Any]
"""The content of each bench/results/*.json, by name."""
Blocks = Mapping[str, Callable[[Records], str]]

MARK = re.compile(r"<!--\s*(?:end of )?figure[^\n]*", re.I)
"""What is meant as one, with the rest of its line."""
BEGIN, END = r"<!-- figures: (?P<name>[\w-]+), [^\n]*-->", "<!-- end of figures -->"
MARKED = re.compile(rf"(?P<begin>{BEGIN}\n)(?P<text>(?:(?!(?i:{MARK.pattern})).)*)(?P<end>{END}(?:\n|\Z))", re.S)
PLACES = ("README.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md", "examples/**/*.md")
WIDTH = 120
OTHERWISE = {
    "learning-averaging": "learning --task averaging",
    "learning-pydoc": "learning --task pydoc",
    "convergence-short": "convergence",
}
"""The benchmarks of records that are not named as these."""


class NotOnRecordError(LookupError):
    """There is no such record; says what makes it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not on record; `python -m bench {OTHERWISE.get(name, name)} --full` makes it")


class OnRecord(dict[str, Any]):
    """`Records` that say which one they lack."""

    def __missing__(self, name: str) -> Any:
        raise NotOnRecordError(name)


def pages(root: Path = ROOT) -> list[Path]:
    """All that may have marks."""
    return sorted(page for place in PLACES for page in root.glob(place))


def names(text: str) -> list[str]:
    """Of the blocks of a page, in order."""
    return [found["name"] for found in MARKED.finditer(text)]


def filled(text: str, records: Records, blocks: Blocks, *, page: str) -> str:
    """The page with its blocks as the records have them. page: its name, for errors.

    Raises:
        ValueError: if a mark, or the block that it names, is wrong: what is between others would be lost, or stay old.
        NotOnRecordError: if there is no record that a block is made of.
    """
    _check(text, blocks, page)
    known = OnRecord(records)
    return MARKED.sub(lambda found: f"{found['begin']}\n{blocks[found['name']](known).strip()}\n\n{found['end']}", text)


def _check(text: str, blocks: Blocks, page: str) -> None:
    found = {place: block["name"] for block in MARKED.finditer(text) for place in (block.start(), block.start("end"))}
    for mark in MARK.finditer(text):
        if mark.start() not in found:
            wrong = _wrong(mark[0])
        elif found[mark.start()] not in blocks:
            wrong = f"names no block; known: {', '.join(sorted(blocks))}"
        else:
            continue
        line = 1 + text.count("\n", 0, mark.start())
        raise ValueError(f'{page}:{line}: "{mark[0]}" {wrong}')


def _wrong(mark: str) -> str:
    """With a mark that belongs to no block."""
    if re.fullmatch(BEGIN, mark):
        return f'has no end: expected a line "{END}" before any other mark'
    if mark == END:
        return "ends no block: expected the line that begins it before, and no other mark between them"
    return f'is no mark: expected "<!-- figures: NAME, by `hatch run results` -->" or "{END}", alone on a line'


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """In Markdown; the keys of the first row are the heads."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])


def prose(text: str) -> str:
    """A paragraph, in lines of a page's width."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
