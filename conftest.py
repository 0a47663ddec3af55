"""Settings of hypothesis for the whole tree: no time limits per example, machines are shared and noisy. And workers.

"check" is for every day; `pytest --hypothesis-profile whole` tries twice as many examples, "thorough" forty times as
many, "quick" half of them, also where a test takes a share of `settings.default.max_examples`.
Of the cases of a test with the mark `few(n)` only n are taken, without --whole, -k, --lf or a test's name.
"""

import gc
import os
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("check", max_examples=10, **COMMON)
settings.register_profile("whole", max_examples=20, **COMMON)
settings.register_profile("quick", max_examples=5, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
settings.load_profile("check")
gc.disable()  # until all tests are imported


QUICK = "quick and not slow"
"""Of `hatch run quick`: what -m it gives."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares `hatch run quick` the files that choose no such mark: to import them all takes longer than their tests."""
    if config.option.markexpr == QUICK and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --whole."""
    parser.addoption("--whole", action="store_true", help="take every case of the tests that are marked few(n)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests marked few(n), alike in every run."""
    options = config.option
    asked = options.whole or options.keyword or getattr(options, "lf", False)
    if asked or any("::" in name for name in config.args):
        return
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for of in cases.values():
        (count,) = of[0].get_closest_marker("few").args  # type: ignore[union-attr]
        left_out.update(set(of) - set(spread(of, count)))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases, each the one with most values of parameters that were met least so far."""
    met, taken, left = Counter[tuple[str, int]](), list[pytest.Item](), list(cases)
    given = {case: case.callspec.params.items() if hasattr(case, "callspec") else () for case in cases}
    values = {case: [(name, id(value)) for name, value in of] for case, of in given.items()}  # cases share them
    for _ in range(min(count, len(cases))):
        best = min(left, key=lambda case: sum(met[value] for value in values[case]))
        met.update(values[best])
        taken.append(best)
        left.remove(best)
    return taken


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spares garbage collections torch's million objects and the tests themselves: a tenth of the time."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked mpich where mpiexec is Open MPI's."""
    if item.get_closest_marker("mpich") and "Open MPI" in _mpiexec():
        pytest.skip("mpiexec is Open MPI's, which has options, words and codes of its own, and no slow links")


@cache
def _mpiexec() -> str:
    """What the mpiexec beside this Python says of itself."""
    launcher = Path(sys.executable).parent / "mpiexec"
    return subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout if launcher.exists() else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """-n auto: twice as many as cores, since real ranks that wait for time-outs leave theirs idle."""
    return 2 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
