"""The site's pictures of algorithms are those of the schedules as they are, and every algorithm has a page with one."""

from __future__ import annotations

import json

import pytest
from data_parallel.schemes.table import COMPRESSORS
from local_sgd import ALGORITHMS as PERIODIC
from sparse_collectives import ALGORITHMS
from traces import arrows, check_trace

from release.packages import ROOT
from website.pictures import FOLDER, QUORUMS, pictures
from website.timeline import KEPT, PICTURE, drawn, kept

PICTURES = pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_the_schedule(name):
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name](), "draw it anew: python -m website.pictures"


@pytest.mark.parametrize("name", [*ALGORITHMS, *COMPRESSORS, *PERIODIC, *QUORUMS])
def test_every_algorithm_has_a_page_with_its_picture(name):
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    assert f"(pictures/{name}.svg)" in page
    assert f"algorithms/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"({name}.md)" in (ROOT / "docs" / "algorithms" / "index.md").read_text()


def test_the_timeline_is_that_of_the_trace_that_was_kept():
    trace = json.loads(KEPT.read_text())
    check_trace(trace)
    assert len(arrows(trace)) > 10
    assert PICTURE.read_text() == drawn(trace), "draw it anew: python -m website.timeline"


def test_one_step_of_a_trace_is_kept():
    def bar(name, pid, began, seconds):
        return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": 1e6 * began, "dur": 1e6 * seconds}

    steps = [("forward", 0), ("step", 5)]
    bars = [bar(name, rank, 10 * number + at + rank, 1) for number in range(3) for name, at in steps for rank in (0, 1)]
    ends = [{"ph": "s", "ts": 11.5e6}, {"ph": "f", "ts": 13e6}, {"ph": "s", "ts": 14e6}, {"ph": "f", "ts": 19e6}]
    arrows = [
        end | {"name": "message", "cat": "message", "id": at // 2, "pid": 0, "tid": 1} for at, end in enumerate(ends)
    ]
    found = kept({"traceEvents": [*bars, *arrows]})["traceEvents"]
    assert [(event["ph"], event["name"], event["ts"] / 1e6) for event in found] == [
        ("X", "forward", 0.001),
        ("X", "forward", 1.001),
        ("s", "message", 1.501),
        ("f", "message", 3.001),
        ("X", "step", 5.001),
        ("X", "step", 6.001),
    ]


def test_no_picture_is_left_over():
    assert {file.stem for file in FOLDER.iterdir()} == set(PICTURES)
