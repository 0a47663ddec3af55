"""advise on real ranks: it measures the link that the ranks have, and only rank 0 speaks."""

from __future__ import annotations

import json

import pytest

FLAGS = ["-m", "sparse_collectives.advise", "--parameters", "1e5", "--step-seconds", "0.1", "--json"]


def check(out, ranks):
    found = json.loads(out)
    assert found["ranks"] == ranks
    assert found["link"]["name"] == "measured"
    assert found["link"]["beta"] > 0
    assert found["pairs"]["alpha"] > 0


@pytest.mark.mpi
def test_under_mpiexec(mpiexec):
    done = mpiexec(3, *FLAGS)
    assert done.returncode == 0, done.stderr
    check(done.stdout, 3)


def test_under_torchrun(processes):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    [done] = processes(1, *torchrun, *FLAGS)
    assert done.returncode == 0, done.stderr
    check(done.stdout, 2)
