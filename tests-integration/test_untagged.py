"""A line without tags or lengths, as NCCL's, when a rank dies; its laws: test_on_ranks.py."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


DIES = """
import os, signal
import torch, torch.distributed as dist
from communicators import allreduce
from untagged_gloo import untagged_communicator
dist.init_process_group("gloo")
comm = untagged_communicator(dist.group.WORLD)
allreduce(torch.ones(3), comm, native=False)
if comm.rank == 1:
    comm.transport.line.exchange = lambda sends, recvs: os.kill(os.getpid(), signal.SIGKILL)
allreduce(torch.ones(3), comm, native=False)
"""


def test_a_rank_that_dies_in_a_round_frees_the_others(processes, tmp_path):
    """The call is agreed on by then. NCCL's line would notice nothing; this one, gloo's, may notice first by itself."""
    script = tmp_path / "dies.py"
    script.write_text(f"import sys\nsys.path.append({str(HERE)!r})\n{DIES}")
    first, dead, last = processes(3, script, timeout=60)
    assert dead.returncode == -9, dead.stderr
    for launch in (first, last):
        assert launch.returncode == 1
        said = ("CollectiveError: rank 1 is gone: its connection was lost", "Connection closed by peer")
        assert "CollectiveError: rank " in launch.stderr, launch.stderr
        assert any(one in launch.stderr for one in said), launch.stderr
