"""A page keeps what its authors wrote: a mark that is wrong is refused, before anything is made of the page."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import pages
from bench.pages import BLOCKS, NotOnRecordError, filled, names
from bench.record import RESULTS

BEGIN, END = "<!-- figures: {}, by `hatch run results` -->", "<!-- end of figures -->"
SMALL = {name: lambda records, name=name: f"{name} {records['r']}" for name in ("one", "two")}
PROSE = st.sampled_from(["words", "| a | b |", "", "<!-- a comment -->", "## Head"])
PARTS = st.lists(st.sampled_from(("one", "two")) | PROSE, min_size=1, max_size=6)


def lines_of(parts, content):
    """The page's lines, `content` in its blocks."""
    return [
        line
        for part in parts
        for line in ([BEGIN.format(part), "", *content(part), "", END] if part in SMALL else [part])
    ]


@given(PARTS, st.sampled_from(["", "\n"]))
def test_only_what_is_between_marks_is_made_anew(parts, last):
    """Also where the file ends with a mark, with or without a newline."""
    before = "\n".join(lines_of(parts, lambda name: ["old", name])) + last
    after = "\n".join(lines_of(parts, lambda name: [f"{name} 7"])) + last
    assert filled(before, {"r": 7}, SMALL, page="a.md") == after
    assert filled(after, {"r": 7}, SMALL, page="a.md") == after
    assert names(before) == [part for part in parts if part in SMALL]


GARBLED = (
    "<!-- figures: one -->",
    "<!-- figure: one, by hand -->",
    "<!--figures: one, by hand -->",
    "<!-- figures: one, by hand --> words",
    "<!-- Figures: one, by hand -->",
    "<!-- end of figure -->",
    "<!-- end of figures --> words",
    "",
)
"""The last one: no mark at all."""


@given(st.data(), PARTS.filter(lambda parts: any(part in SMALL for part in parts)), st.sampled_from(GARBLED))
def test_a_wrong_mark_is_refused_with_its_page_and_line(data, parts, garbled):
    lines = lines_of(parts, lambda name: ["old"])
    marks = [number for number, line in enumerate(lines) if line == END or line.startswith("<!-- figures: ")]
    wrong = data.draw(st.sampled_from(marks))
    lines[wrong] = garbled
    with pytest.raises(ValueError, match=r'^a\.md:\d+: "<!--.*" ') as refused:
        filled("\n".join(lines), {"r": 7}, SMALL, page="a.md")
    told = int(re.match(r"a\.md:(\d+)", str(refused.value))[1]) - 1
    before = [mark for mark in marks if mark < wrong][-1:]
    after = [mark for mark in marks if mark > wrong][:1]
    assert told in [wrong, *before, *after]


def test_prose_and_the_next_block_outlive_a_forgotten_end():
    page = f"{BEGIN.format('one')}\n\nold\n\nprose of an author\n\n{BEGIN.format('two')}\n\nold\n\n{END}\n"
    with pytest.raises(ValueError, match=r"docs/a\.md:1: .*one.* has no end"):
        filled(page, {"r": 7}, SMALL, page="docs/a.md")


def test_a_missing_record_is_named_with_what_makes_it():
    page = f"{BEGIN.format('eager')}\n\nold\n\n{END}\n"
    with pytest.raises(NotOnRecordError, match=r"`python -m bench eager --full` makes it"):
        filled(page, {}, BLOCKS, page="a.md")
    with pytest.raises(NotOnRecordError, match=r"`python -m bench learning --task pydoc --full` makes it"):
        BLOCKS["learning-pydoc"]({})


def test_without_a_record_the_check_says_so_and_goes_on(monkeypatch, tmp_path, capsys):
    for path in RESULTS.glob("*.[jm]*"):
        if path.stem != "eager":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.main(["--check"]) == 1
    told = capsys.readouterr().out
    assert "docs/packages/partial-collectives.md is kept as it is: eager is not on record" in told
    assert "docs/apps/deepspeech.md is kept as it is: eager is not on record" in told
    assert "docs/results.md is kept as it is: eager is not on record" in told


def test_dense_is_found_by_its_name_wherever_its_row_is():
    records = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("learning", "local-sgd")}
    turned = {**records["local-sgd"], "rows": records["local-sgd"]["rows"][::-1]}
    averaging = BLOCKS["periodic-averaging"]
    assert averaging({**records, "local-sgd": turned}) == averaging(records)
