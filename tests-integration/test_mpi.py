"""The MPI world under real mpiexec: laws, background work, and the same reason on all ranks within seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi

LAWS = ["dense_laws", "dense_calls", "background", "background_leaves_mpi_alone"]
FAILURES = {
    "other_sizes": "ranks disagree on call 0: rank 0 calls native allreduce(numel=5, torch.float32), rank {last} calls "
    "native allreduce(numel=6, torch.float32)",
    "other_order": "ranks disagree on call 2",
    "late_rank": "timed out after 1 s: rank",
    "error_in_schedule": "rank {last} failed in broken: ZeroDivisionError: by hand",
    "error_in_background": "rank {last} failed in broken: ZeroDivisionError: by hand",
}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def outcomes(request, mpiexec, tmp_path_factory):
    report = tmp_path_factory.mktemp("mpi") / "report.json"
    launch = mpiexec(request.param, HERE / "on_mpi_ranks.py", report)
    assert launch.returncode == 0, launch.stderr
    return request.param, json.loads(report.read_text())


@pytest.mark.parametrize("case", LAWS)
def test_laws(outcomes, case):
    _, cases = outcomes
    errors = [outcome["error"] for outcome in cases[case] if "error" in outcome]
    assert not errors, errors[0]


@pytest.mark.parametrize("case", FAILURES)
def test_the_same_reason_on_all_ranks_within_seconds(outcomes, case):
    size, cases = outcomes
    if size == 1:
        assert case not in cases  # nobody to disagree with
        return
    errors = [outcome["error"] for outcome in cases[case] if "error" in outcome]
    assert not errors, errors[0]
    reasons = {outcome["reason"] for outcome in cases[case]}
    assert len(reasons) == 1, reasons
    assert reasons.pop().startswith(FAILURES[case].format(last=size - 1))
    assert max(outcome["seconds"] for outcome in cases[case]) < 30


def test_a_rank_that_raises_in_user_code_frees_the_others(mpiexec, tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(
        "from mpi4py import MPI\n"
        "import torch\n"
        "from communicators import allreduce, as_communicator\n"
        "comm = as_communicator(None)\n"
        "allreduce(torch.ones(3), comm)\n"
        "if comm.rank == 1:\n"
        "    raise ValueError('mine')\n"
        "allreduce(torch.ones(3), comm)\n"
    )
    launch = mpiexec(3, script, timeout=60)
    assert launch.returncode != 0
    assert launch.stderr.count("ValueError: mine\n") == 1
    assert launch.stderr.count("CollectiveError: rank 1 left (ValueError: mine) while rank") == 2
