"""Pages with figures, and marked blocks of other pages, of bench/results: `hatch run results`.

    python -m bench.pages [--check] [--run [NAME ...]]

The templates of bench/templates, Jinja's, are filled in from `records` (each bench/results/*.json by name) and
`published` (bench/published.toml). Two are whole pages, see `WHOLE`; other NAME.md.j2 are blocks between two marks:

    <!-- figures: NAME, by `hatch run results` -->

    ...

    <!-- end of figures -->

Filters `where`, `each` and `derive` take expressions of a row's columns: `rows|where("P == 4")|each("sent / n")`.
--check: writes no page, and ends with 1 if a page is not what the records make. --run: makes the records of
both pages first, or those named: every benchmark in full, one after another, on a machine with nothing else to do.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from data_parallel.backward_order import BUCKET_BYTES
from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
from slow_link.check import TOLERANCE
from sparse_compress import HEADER_BYTES, WireCodec, index_entropy

from bench.advise import shown
from bench.convergence.tasks import TASKS
from bench.internet import hours
from bench.record import RESULTS, ROOT
from bench.scaling import published
from bench.time_to_quality.best import best_of

Row = Mapping[str, Any]
Records = Mapping[str, Any]
"""The content of each bench/results/*.json, by name."""
Blocks = Mapping[str, Callable[[Records], str]]

TEMPLATES, SUFFIX = Path(__file__).parent / "templates", ".md.j2"
WHOLE = {ROOT / "docs" / f"{name}.md": name for name in ("results", "marks")}
"""Pages that one template makes."""
SECTIONS = ("sweeps", "time-to-quality")
"""Templates of such pages' sections; the others are blocks."""
PICTURES = ROOT / "docs" / "images" / "results"
SHOWN = (
    *("scaling", "eager", "sweeps", "demo", "collectives", "local-sgd", "partial", "overlap", "predictions"),
    *("slow-link", "compress", "time-to-quality"),
)
"""Records that these pages show: simulated ones first, which a busy machine spoils least."""
PLACES = ("README.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md", "examples/**/*.md")
WIDTH = 120
BUSY = 1.0
"""Load average a core before a measurement, above which the machine was busy."""
MARK = re.compile(r"<!--\s*(?:end of )?figure[^\n]*", re.I)
"""Anything meant as a mark, with the rest of its line."""
BEGIN, END = r"<!-- figures: (?P<name>[\w-]+), [^\n]*-->", "<!-- end of figures -->"
MARKED = re.compile(rf"(?P<begin>{BEGIN}\n)(?P<text>(?:(?!(?i:{MARK.pattern})).)*)(?P<end>{END}(?:\n|\Z))", re.S)
WRONG = f'is no mark, or has no end or beginning: expected "<!-- figures: NAME, by `hatch run results` -->" and "{END}"'


def main(argv: Sequence[str] = ()) -> int:
    """Writes the pages; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only tell whether pages are what the records make")
    parser.add_argument("--run", nargs="*", choices=SHOWN, metavar="NAME", help="make these records first; none: all")
    options = parser.parse_args(argv)
    failed = 0
    for name in SHOWN if options.run == [] else options.run or ():
        failed |= subprocess.run([sys.executable, "-m", "bench", name, "--full"], cwd=ROOT).returncode
    made, lacking = changed({path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))})
    for path, missing in lacking.items():
        print(f"{path.relative_to(ROOT)} is kept as it is: {missing}")
    for path, text in made.items():
        if options.check:
            print(f"not what the records make: {path.relative_to(ROOT)}; run `hatch run results`")
        else:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
    for name in () if options.check else SHOWN:
        shutil.copyfile(RESULTS / f"{name}.png", PICTURES / f"{name}.png")
    return 1 if lacking or failed or (made and options.check) else 0


def changed(records: Records) -> tuple[dict[Path, str], dict[Path, str]]:
    """Pages that are not what the records make, as they are to be; and pages that lack a figure: which.

    Raises:
        ValueError: if a page has a wrong mark.
    """
    made: dict[Path, str] = {}
    lacking: dict[Path, str] = {}
    for path in pages():
        before, name = path.read_text(), str(path.relative_to(ROOT))
        try:
            after = rendered(WHOLE[path], records) if path in WHOLE else filled(before, records, BLOCKS, page=name)
        except (NotOnRecordError, UndefinedError) as missing:
            lacking[path] = str(missing)
        else:
            made |= {path: after} if after != before else {}
    return made, lacking


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
    if unknown := [name for name in names(text) if name not in blocks]:
        raise ValueError(f"{page}: no block is called {unknown[0]}; known: {', '.join(sorted(blocks))}")
    outside = MARKED.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    if mark := MARK.search(outside):
        raise ValueError(f'{page}:{1 + outside.count(chr(10), 0, mark.start())}: "{mark[0]}" {WRONG}')


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


ENVIRONMENT = Environment(  # noqa: S701 - makes Markdown of our own records
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.do"],
)
ENVIRONMENT.filters |= {"where": _where, "each": _each, "derive": _derive, "by": _by, "table": _table, "f": format}
ENVIRONMENT.filters |= {"times": _times, "wrapped": _wrapped, "anchor": _anchor, "stdev": statistics.stdev}
ENVIRONMENT.globals |= {
    "best_of": best_of,
    "internet": hours,
    "advice": shown,
    "tasks": TASKS,
    "near": TOLERANCE,
    "busy_load": BUSY,
}
ENVIRONMENT.globals |= {"bucket_bytes": BUCKET_BYTES, "WireCodec": WireCodec, "index_entropy": index_entropy}
ENVIRONMENT.globals |= {"header_bytes": HEADER_BYTES}
BLOCKS: Blocks = {
    name: partial(rendered, name)
    for name in sorted(path.name.removesuffix(SUFFIX) for path in TEMPLATES.glob(f"*{SUFFIX}"))
    if name not in (*SECTIONS, *WHOLE.values())
}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
