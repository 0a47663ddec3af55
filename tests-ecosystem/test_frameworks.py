"""Each item at two ranks, one launch a framework; the page of the docs tells of these items; the examples learn."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from page import MODULES, PAGE, table

HERE = Path(__file__).parent
EXAMPLES = ("lightning", "accelerate", "transformers")


@pytest.fixture(scope="module")
def outcomes(torchrun, tmp_path_factory):
    """outcomes(module) -> {item: what went wrong on each rank}."""
    found = {}

    def of(module):
        if module not in found:
            report = tmp_path_factory.mktemp("ranks") / "report.json"
            status, output = torchrun(HERE / "on_two_ranks.py", report, module)
            assert status == 0, output
            found[module] = json.loads(report.read_text())
        return found[module]

    return of


@pytest.mark.parametrize(
    ("module", "name"), [(module, item.name) for module in MODULES for item in import_module(module).ITEMS]
)
def test_items(outcomes, module, name):
    errors = outcomes(module)[name]
    assert errors == [None, None], next(filter(None, errors))


def test_the_page_tells_of_these_items():
    """If not: python tests-ecosystem/page.py."""
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_learn(torchrun, name):
    status, output = torchrun(HERE.parent / "examples" / name / "digits.py")
    assert status == 0, output
    accuracy = float(re.search(r"test accuracy ([\d.]+)% on 2 ranks", output)[1])
    assert accuracy > 90, output


def test_the_accelerate_example_goes_on(torchrun, tmp_path):
    """Twice the same folder: the second run begins with what the first has learnt."""
    script = HERE.parent / "examples" / "accelerate" / "digits.py"
    for _ in range(2):
        status, output = torchrun(script, tmp_path / "state")
        assert status == 0, output
