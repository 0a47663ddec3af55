"""Every feature of DDP with the sparse hook, on 2 and 3 gloo ranks; the cases are in ddp_cases.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ddp_cases import CASES

SCRIPT = Path(__file__).parent / "ddp_cases.py"


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request, processes, tmp_path_factory):
    report = tmp_path_factory.mktemp("ddp") / "report.json"
    for done in processes(request.param, SCRIPT, report):
        assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_feature(outcomes, case):
    errors = [error for error in outcomes[case] if error]
    assert not errors, errors[0]
