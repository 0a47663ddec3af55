"""Real ranks with data on a device: on one that is only pretended, and, marked `gpu`, on GPUs over gloo and NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import device_on_ranks
import pytest
import torch
from devices import needs_pretend

HERE = Path(__file__).parent
GPUS_NEEDED = {"gloo": 1, "nccl": 2}
BACKENDS = [
    *(pytest.param(f"pretend-{line}", marks=needs_pretend) for line in ("gloo", "untagged")),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in GPUS_NEEDED),
]


@pytest.fixture(scope="module", params=BACKENDS)
def outcomes(request, processes, tmp_path_factory):
    """(number of ranks, {case: [outcome of each rank]}); NCCL takes one GPU a rank, the others share."""
    gpus, needed = torch.cuda.device_count(), GPUS_NEEDED.get(request.param, 0)
    if gpus < needed:
        pytest.skip(f"{gpus} GPUs, {request.param} needs {needed}")
    size = min(gpus, 3) if request.param == "nccl" else 2 if needed else 3
    report = tmp_path_factory.mktemp("device") / "report.json"
    for launch in processes(size, HERE / "device_on_ranks.py", request.param, report, timeout=200):
        assert launch.returncode == 0, launch.stderr
    return size, json.loads(report.read_text())


@pytest.mark.parametrize("case", [case.__name__ for case in device_on_ranks.LAWS])
def test_laws(outcomes, case):
    size, cases = outcomes
    if case not in cases:
        pytest.skip("DDP keeps to devices that it knows")
    errors = [outcome.get("error") or outcome.get("reason") for outcome in cases[case]]
    assert errors == [None] * size, next(filter(None, errors))


@pytest.mark.parametrize("case", device_on_ranks.FAILURES)
def test_the_same_reason_on_all_ranks(outcomes, case):
    size, cases = outcomes
    reasons = {outcome.get("reason", str(outcome)) for outcome in cases[case.__name__]}
    assert len(reasons) == 1, reasons
    assert reasons.pop().startswith(device_on_ranks.FAILURES[case].format(last=size - 1))
