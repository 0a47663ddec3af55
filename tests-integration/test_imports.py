"""Imports point one way: who may import whom, and nothing at import time that is not asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from imported_modules import imported

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "communicators",
    "sparse_compress",
    "sparse_collectives",
    "replicas",
    "data_parallel",
    "local_sgd",
    "partial_collectives",
}
ALLOWED = {
    "communicators": set(),
    "sparse_compress": set(),
    "sparse_collectives": {"communicators", "sparse_compress"},
    "replicas": {"communicators"},
    "data_parallel": {"communicators", "sparse_compress", "sparse_collectives", "replicas"},
    "local_sgd": {"communicators", "replicas"},
    "partial_collectives": {"communicators", "replicas"},
    "thinwire_trainer": PACKAGES,
    "thinwire_cifar": {"thinwire_trainer", *PACKAGES},
    "thinwire_deepspeech": {"thinwire_trainer", *PACKAGES},
    "thinwire_text": {"thinwire_trainer", *PACKAGES},
    **{name: {f"thinwire_{name}", "thinwire_trainer"} for name in ("cifar", "deepspeech", "text")},
    "trainer": {"thinwire_trainer"},
    "thinwire_commands": set(),
    "slow_link": {"communicators"},
    "thinwire": {"slow_link", *PACKAGES},
}
SOURCES = {path.name: path for pattern in ("packages/*/src/*", "apps/*/src/*") for path in ROOT.glob(pattern)}


def test_every_member_is_known():
    assert set(SOURCES) - set(ALLOWED) == set()
    assert {
        "communicators",
        "sparse_compress",
        "sparse_collectives",
        "local_sgd",
        "thinwire_trainer",
        "thinwire_cifar",
    } <= set(SOURCES)


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


def graph_of(package):
    """module -> the package's own modules that it imports: at the top, in functions, or for types only."""
    root = SOURCES[package]
    files = {module_of(root, file): file for file in root.rglob("*.py")}
    return {module: set(own_imports(module, file, files)) - {module} for module, file in files.items()}


def module_of(root, file):
    parts = [root.name, *file.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_imports(module, file, modules):
    """The longest of each import's names that is one of the modules; a package's `__init__` bears its name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                yield name


def circle_in(graph):
    """One circle as a list of modules, the first one again at its end; empty if there is none."""
    done = set()

    def visit(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_circles(name):
    """Also not one that is hidden in a function or under TYPE_CHECKING: its modules could not be read one by one."""
    circle = circle_in(graph_of(name))
    assert not circle, " -> ".join(circle)


def test_packages_need_neither_mpi_nor_triton_nor_hypothesis():
    """A laptop has none of them; importing must not ask for them, nor start anything."""
    code = (
        "import importlib, sys, threading\n"
        "for absent in ('mpi4py', 'triton', 'hypothesis'): sys.modules[absent] = None\n"
        f"for name in {sorted(PACKAGES)}:\n"
        "    importlib.import_module(name)\n"
        "    assert threading.active_count() == 1, (name, threading.enumerate())\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
