"""The site's pictures of algorithms are those of the schedules as they are, and every algorithm has a page with one."""

from __future__ import annotations

import pytest
from data_parallel.schemes.table import COMPRESSORS
from local_sgd import ALGORITHMS as PERIODIC
from sparse_collectives import ALGORITHMS

from release.packages import ROOT
from website.pictures import FOLDER, QUORUMS, pictures

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


def test_no_picture_is_left_over():
    assert {file.stem for file in FOLDER.iterdir()} == set(PICTURES)
