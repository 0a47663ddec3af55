"""Which cases of tests marked few(n) are taken."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"
TESTS = """
import pytest

@pytest.mark.few(8)
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(8))
def test_product(a, b): pass

@pytest.mark.few(0)
def test_seldom(): pass

@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.few(0))])
def test_one_of_two(a): pass

def test_always(): pass
"""


@pytest.fixture
def taken(tmp_path):
    """taken(*words) -> names of the tests that pytest takes, of TESTS."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = few(n)\n")
    (tmp_path / "test_some.py").write_text(TESTS)

    def collect(*words):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return re.findall(r"^test_some.py::(\S+)", done.stdout, re.MULTILINE)

    return collect


def test_few_without_whole(taken):
    found = taken()
    pairs = [name[-4:-1].split("-") for name in found if name.startswith("test_product")]
    assert len(pairs) == 8
    assert [len({pair[place] for pair in pairs}) for place in (0, 1)] == [8, 2]  # every value of both
    assert [name for name in found if "product" not in name] == ["test_one_of_two[0]", "test_always"]


@pytest.mark.parametrize("words", [["--whole"], ["test_some.py::test_product", "test_some.py"]])
def test_all_where_they_are_asked_for(taken, words):
    assert len(set(taken(*words))) == 16 + 1 + 2 + 1
