"""Pages with figures: the templates of bench/templates, filled in from the records.

results.md.j2 is docs/results.md. Every other NAME.md.j2 is a block, which stands on a page between two marks:

    <!-- figures: NAME, by `hatch run results` -->

    ...

    <!-- end of figures -->

Templates are Jinja's, and see `records` (each bench/results/*.json by name) and `published` (bench/published.toml).
Their filters `where`, `each` and `derive` take expressions of a row's columns: `rows|where("P == 4")|each("sent / n")`.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from data_parallel.backward_order import BUCKET_BYTES
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from slow_link.check import TOLERANCE
from sparse_compress import HEADER_BYTES, WireCodec, index_entropy

from bench.advise import shown
from bench.convergence.tasks import TASKS
from bench.form import RESULTS, ROOT
from bench.published import published

Row = Mapping[str, Any]
Records = Mapping[str, Any]
"""The content of each bench/results/*.json, by name."""
Blocks = Mapping[str, Callable[[Records], str]]

TEMPLATES, SUFFIX = Path(__file__).parent / "templates", ".md.j2"
SECTIONS = ("results", "peers", "sweeps")
"""Templates that make docs/results.md; the others are blocks."""
PLACES = ("README.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md", "examples/**/*.md")
WIDTH = 120
BUSY = 1.0
"""Load average a core before a measurement, above which the machine was busy."""
MARK = re.compile(r"<!--\s*(?:end of )?figure[^\n]*", re.I)
"""Anything meant as a mark, with the rest of its line."""
BEGIN, END = r"<!-- figures: (?P<name>[\w-]+), [^\n]*-->", "<!-- end of figures -->"
MARKED = re.compile(rf"(?P<begin>{BEGIN}\n)(?P<text>(?:(?!(?i:{MARK.pattern})).)*)(?P<end>{END}(?:\n|\Z))", re.S)


class NotOnRecordError(Exception):
    """A record that a page needs does not exist; names the benchmark that makes it."""

    def __init__(self, name: str) -> None:
        task = name.removeprefix("learning-")
        asked = f"learning --task {task}" if task != name else name
        super().__init__(f"{name} is not on record; `python -m bench {asked} --full` makes it")


class OnRecord(dict[str, Any]):
    """`Records` that name the one they lack."""

    def __missing__(self, name: str) -> Any:
        raise NotOnRecordError(name)


def rendered(name: str, records: Records) -> str:
    """A template's text. Raises NotOnRecordError where it needs a record that does not exist."""
    text = ENVIRONMENT.get_template(name + SUFFIX).render(records=OnRecord(records), published=published())
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip() + "\n"


def pages(root: Path = ROOT) -> list[Path]:
    """All pages that may have marks."""
    return sorted(page for place in PLACES for page in root.glob(place))


def names(text: str) -> list[str]:
    """Names of a page's blocks, in order."""
    return [found["name"] for found in MARKED.finditer(text)]


def filled(text: str, records: Records, blocks: Blocks, *, page: str) -> str:
    """The page with its blocks as the records have them. page: its name, for errors.

    Raises:
        ValueError: if a mark, or the block that it names, is wrong: text between others would be lost, or stay old.
        NotOnRecordError: if there is no record that a block is made of.
    """
    _check(text, blocks, page)

    def block(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{blocks[found['name']](records).strip()}\n\n{found['end']}"

    return MARKED.sub(block, text)


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
    """Reason why a mark belongs to no block."""
    if re.fullmatch(BEGIN, mark):
        return f'has no end: expected a line "{END}" before any other mark'
    if mark == END:
        return "ends no block: expected the line that begins it before, and no other mark between them"
    return f'is no mark: expected "<!-- figures: NAME, by `hatch run results` -->" or "{END}", alone on a line'


@cache
def _expression(text: str) -> Callable[[Row], Any]:
    return ENVIRONMENT.compile_expression(text, undefined_to_none=False)


def _where(rows: Iterable[Row], condition: str, **given: Any) -> list[Row]:
    """Rows for which an expression of their columns holds."""
    holds = _expression(condition)
    return [row for row in rows if holds({**row, **given})]


def _each(rows: Iterable[Row], value: str, **given: Any) -> list[Any]:
    """An expression's value for each row."""
    of = _expression(value)
    return [of({**row, **given}) for row in rows]


def _derive(rows: Iterable[Row], columns: Mapping[str, str], **given: Any) -> list[dict[str, Any]]:
    """Rows with further columns, each an expression of those before it."""
    made = [{**row} for row in rows]
    for name, value in columns.items():
        of = _expression(value)
        for row in made:
            row[name] = of({**row, **given})
    return made


def _by(rows: Iterable[Row], column: str) -> dict[Any, Row]:
    """Rows by the value of a column that tells them apart."""
    return {row[column]: row for row in rows}


def _table(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table in Markdown. columns: by head, the cell of a row as `str.format` has it, such as "{compute_ms:.0f}"."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(columns.values()).format_map(row) + " |" for row in rows)])


def _times(factors: Sequence[float]) -> str:
    return f"{min(factors):.1f}–{max(factors):.1f}×"


def _wrapped(text: str) -> str:
    """A paragraph in lines of a page's width."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _anchor(title: str) -> str:
    """Anchor of a section; headings' own anchors differ from site to site."""
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")


def _written(name: str) -> str:
    """A table that a benchmark leaves beside its record."""
    if not (path := RESULTS / f"{name}.md").exists():
        raise NotOnRecordError(name)
    return path.read_text()


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.do"],
)
ENVIRONMENT.filters |= {"where": _where, "each": _each, "derive": _derive, "by": _by, "table": _table, "f": format}
ENVIRONMENT.filters |= {"times": _times, "wrapped": _wrapped, "anchor": _anchor, "stdev": statistics.stdev}
ENVIRONMENT.globals |= {"written": _written, "advice": shown, "tasks": TASKS, "near": TOLERANCE, "busy_load": BUSY}
ENVIRONMENT.globals |= {"bucket_bytes": BUCKET_BYTES, "WireCodec": WireCodec, "index_entropy": index_entropy}
ENVIRONMENT.globals |= {"header_bytes": HEADER_BYTES}
BLOCKS: Blocks = {
    name: partial(rendered, name)
    for name in sorted(path.name.removesuffix(SUFFIX) for path in TEMPLATES.glob(f"*{SUFFIX}"))
    if name not in SECTIONS
}
