"""Settings of hypothesis for the whole tree: no time limits per example, machines are shared and noisy. And workers.

"check" is for every day; `pytest --hypothesis-profile whole` tries twice as many examples, "thorough" forty times as
many, "quick" half of them, also where a test takes a share of `settings.default.max_examples`.
Of the cases of a test with the mark `few(n)` only n are taken, without --whole, -k, or a name of a test.
"""

import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("check", max_examples=10, **COMMON)
settings.register_profile("whole", max_examples=20, **COMMON)
settings.register_profile("quick", max_examples=5, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
settings.load_profile("check")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares `-m quick` the files that choose no such mark: to import them all takes longer than their tests."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --whole."""
    parser.addoption("--whole", action="store_true", help="take every case of the tests that are marked few(n)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests marked few(n), alike in every run."""
    if config.option.whole or config.option.keyword or any("::" in name for name in config.args):
        return
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for of in cases.values():
        (count,) = of[0].get_closest_marker("few").args  # type: ignore[union-attr]
        left_out.update(set(of) - {of[place] for place in spread(len(of), count)})
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def spread(size: int, count: int) -> list[int]:
    """So many of the places below size, by the golden ratio: of a product of parameters no value is met too often."""
    order = sorted(range(size), key=lambda place: place * 0.6180339887498949 % 1)
    return order[:count]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """-n auto: one more than cores, since real ranks that wait for time-outs leave theirs idle."""
    return 1 + len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1 + (os.cpu_count() or 1)
