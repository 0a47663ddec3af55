"""A line without tags or lengths, as NCCL's, when a rank dies; its laws: test_on_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


DIES = """
import os, signal, time
import torch, torch.distributed as dist
from communicators import allreduce
from untagged_gloo import untagged_communicator
dist.init_process_group("gloo")
comm = untagged_communicator(dist.group.WORLD)
allreduce(torch.ones(3), comm, native=False)
if comm.rank == 1:
    comm.transport.line.sendrecv = lambda sends, recvs: os.kill(os.getpid(), signal.SIGKILL)
elif LATE:  # posts messages whose lengths have come, when the connection is lost already
    line, posts = comm.transport.line, []
    post = line.post
    line.post = lambda sends, recvs: (posts.append(1), time.sleep(0.3 * (len(posts) > 1)), post(sends, recvs))[-1]
allreduce(torch.ones(3), comm, native=False)
"""


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_dies_in_a_round_frees_the_others(processes, tmp_path, late):
    """The call is agreed on by then, and the line itself notices nothing."""
    script = tmp_path / "dies.py"
    script.write_text(f"import sys\nsys.path.append({str(HERE)!r})\n{DIES.replace('LATE', str(late))}")
    first, dead, last = processes(3, script, timeout=60)
    assert dead.returncode == -9, dead.stderr
    for launch in (first, last):
        assert launch.returncode == 1
        assert "CollectiveError: rank 1 is gone: its connection was lost" in launch.stderr, launch.stderr
