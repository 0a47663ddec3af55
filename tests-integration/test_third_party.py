"""An algorithm that somebody else wrote, in a package of its own: its laws, and training on real ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "ring-reduce-scatter"


@pytest.fixture
def installed(monkeypatch):
    """As far as Python can tell."""
    path = [str(EXAMPLE / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.few(0)
@pytest.mark.usefixtures("installed")
def test_its_own_tests_pass(forked):
    """Its laws in simulated worlds of 1, 2, 3, 5 and 8 ranks, and training on 3."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=240", EXAMPLE / "tests"]
    [done] = forked(command, [{}], 280, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.usefixtures("installed")
def test_it_trains_on_real_ranks(mpiexec):
    done = mpiexec(2, "-m", "ring_reduce_scatter.train")
    assert done.returncode == 0, done.stderr
    assert "ring-reduce-scatter on 2 ranks" in done.stdout


def test_no_package_knows_of_it():
    files = [
        file
        for folder in ("packages", "apps", "bench")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".toml")
    ]
    assert len(files) > 100
    assert [file for file in files if "ring_reduce_scatter" in file.read_text()] == []
