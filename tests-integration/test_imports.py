"""Imports point one way: who may import whom, and nothing at import time that is not asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"communicators", "sparse_compress", "sparse_collectives", "local_sgd", "partial_collectives"}
ALLOWED = {
    "communicators": set(),
    "sparse_compress": set(),
    "sparse_collectives": {"communicators", "sparse_compress"},
    "local_sgd": {"communicators"},
    "partial_collectives": {"communicators"},
    "trainer": PACKAGES,
    "cifar": {"trainer", *PACKAGES},
    "deepspeech": {"trainer", *PACKAGES},
    "text": {"trainer", *PACKAGES},
}
SOURCES = {path.name: path for pattern in ("packages/*/src/*", "apps/*/src/*") for path in ROOT.glob(pattern)}


def imported(file):
    """Top-level names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_every_member_is_known():
    assert set(SOURCES) - set(ALLOWED) == set()
    assert {"communicators", "sparse_compress", "sparse_collectives", "local_sgd", "trainer", "cifar"} <= set(SOURCES)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_arrows(name):
    siblings = (set(ALLOWED) | {"bench"}) - ALLOWED[name] - {name}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted(SOURCES[name].rglob("*.py"))
        for module in imported(file)
        if module in siblings
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["communicators", "sparse_compress", "sparse_collectives", "local_sgd"])
def test_a_package_needs_neither_mpi_nor_triton_nor_hypothesis(name):
    """A laptop has none of them; importing must not ask for them, nor start anything."""
    code = (
        "import sys, threading\n"
        "for absent in ('mpi4py', 'triton', 'hypothesis'): sys.modules[absent] = None\n"
        f"import {name}\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
