"""Settings of hypothesis for the whole tree: no time limits per example, machines are shared and noisy. And workers.

"check" is for every day; `pytest --hypothesis-profile thorough` tries twenty times as many examples, "quick", for
`hatch run quick`, a quarter, also where a test takes a share of `settings.default.max_examples`.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("check", max_examples=20, **COMMON)
settings.register_profile("quick", max_examples=5, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
settings.load_profile("check")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares `-m quick` the files that choose no such mark: to import them all takes longer than their tests."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """-n auto: one more than cores, since real ranks that wait for time-outs leave theirs idle."""
    return 1 + len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1 + (os.cpu_count() or 1)
