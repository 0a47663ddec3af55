"""Payloads by messages without tags or lengths, as NCCL's are: the laws, and the same reason on all ranks.

On a CPU over gloo used that way; marked `gpu`, over NCCL.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from untagged_on_threads import FAILURES, LAWS, SIZES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def outcomes(processes, tmp_path_factory):
    """{size: {case: [outcome of each rank]}}."""
    report = tmp_path_factory.mktemp("untagged") / "report.json"
    [launch] = processes(1, HERE / "untagged_on_threads.py", report)
    assert launch.returncode == 0, launch.stderr
    return json.loads(report.read_text())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [case.__name__ for case in LAWS])
def test_laws(outcomes, case, size):
    errors = [outcome.get("error") or outcome.get("reason") for outcome in outcomes[str(size)][case]]
    assert errors == [None] * size, next(filter(None, errors))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", FAILURES)
def test_the_same_reason_on_all_ranks_within_seconds(outcomes, case, size):
    got = outcomes[str(size)][case.__name__]
    reasons = {outcome.get("reason", str(outcome)) for outcome in got}
    assert len(reasons) == 1, reasons
    assert reasons.pop().startswith(FAILURES[case].format(last=size - 1))
    assert max(outcome["seconds"] for outcome in got) < 30
