"""Every feature of DDP with the sparse hook, and checkpoints, on 2 and 3 gloo ranks; the cases are in scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sparse_collectives import ALGORITHMS

HERE = Path(__file__).parent
SCRIPTS = ["ddp_cases.py", "ddp_accumulation.py", "ddp_states.py", "late_groups.py"]
SPARSE = [name for name, entry in ALGORITHMS.items() if entry.compresses]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_features(processes, tmp_path, script, size):
    report = tmp_path / "report.json"
    for done in processes(size, HERE / script, report, timeout=280):
        assert done.returncode == 0, done.stderr
    outcomes = json.loads(report.read_text())
    failed = {case: next(filter(None, errors)) for case, errors in outcomes.items() if any(errors)}
    assert outcomes
    assert not failed, "\n\n".join(f"{case}: {error}" for case, error in failed.items())


def accuracies(processes, folder, size, algorithms):
    report = folder / "digits.json"
    for done in processes(size, HERE / "digits_on_ranks.py", report, *algorithms, timeout=840):
        assert done.returncode == 0, done.stderr
    return {name: sum(found) / len(found) for name, found in json.loads(report.read_text()).items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3])
def test_the_example_trains_as_well_as_plain_ddp(processes, tmp_path, size):
    """Mean test accuracy of three seeds, within a point of DDP without the hook; one image in 360 is 0.28 points."""
    mean = accuracies(processes, tmp_path, size, ["none", *SPARSE])
    assert mean["none"] > 0.97
    assert {name: found for name, found in mean.items() if found < mean["none"] - 0.01} == {}, mean
