"""Payloads by messages without tags or lengths, as NCCL's are: the laws, and the same reason on all ranks.

On CPUs over gloo used that way; over NCCL: see test_device_ranks.py.
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
    expected = FAILURES[case] if isinstance(FAILURES[case], tuple) else (FAILURES[case],)
    assert reasons.pop().startswith(tuple(reason.format(last=size - 1) for reason in expected))
    assert max(outcome["seconds"] for outcome in got) < 30


DIES = """
import os, signal
import torch, torch.distributed as dist
from communicators import allreduce
from communicators.worlds.nccl.untagged import UntaggedTransport
from communicators.worlds.process_group import Meeting, ProcessGroupTransport
from communicators.worlds.stores import store_of
from communicators.background.transport_communicator import TransportCommunicator
from untagged_gloo import UntaggedGloo
dist.init_process_group("gloo")
group = dist.group.WORLD
line = UntaggedGloo(dist.PrefixStore("line", store_of(group)), group.rank(), group.size())
comm = TransportCommunicator(UntaggedTransport(ProcessGroupTransport(Meeting.of(group, "here")), line))
allreduce(torch.ones(3), comm, native=False)
if comm.rank == 1:
    line.exchange = lambda sends, recvs: os.kill(os.getpid(), signal.SIGKILL)
allreduce(torch.ones(3), comm, native=False)
"""


def test_a_rank_that_dies_in_a_round_frees_the_others(processes, tmp_path):
    """The call is agreed on by then, and the line itself notices nothing."""
    script = tmp_path / "dies.py"
    script.write_text(f"import sys\nsys.path.append({str(HERE)!r})\n{DIES}")
    first, dead, last = processes(3, script, timeout=60)
    assert dead.returncode == -9, dead.stderr
    for launch in (first, last):
        assert launch.returncode == 1
        assert "CollectiveError: rank 1 is gone: its connection was lost" in launch.stderr
