"""Every collective takes what `as_communicator` takes, and names it where it is given something else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from communicators import allgather, allreduce, allreduce_async, barrier, broadcast, measure_link, run, start
from communicators.schedules.dense import ring_allreduce
from replicas import refuse_unlike

ONES = torch.ones(3)
COLLECTIVES = {
    "allreduce": lambda comm: allreduce(ONES, comm),
    "allreduce by schedule": lambda comm: allreduce(ONES, comm, native=False),
    "allreduce_async": lambda comm: allreduce_async(ONES, comm).wait(),
    "broadcast": lambda comm: broadcast(ONES, comm),
    "allgather": lambda comm: allgather(ONES, comm)[0],
    "barrier": lambda comm: barrier(comm) or ONES,
    "refuse_unlike": lambda comm: refuse_unlike({"x": ONES}, comm) and ONES,
    "measure_link": lambda comm: measure_link(comm) and ONES,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_no_group_is_refused(name):
    with pytest.raises(TypeError, match=r"expected an mpi4py communicator, a torch process group.* got str"):
        COLLECTIVES[name]("world")


@pytest.mark.parametrize("carry", [run, start])
def test_a_schedule_is_carried_by_a_communicator(carry):
    """It was made for a rank of a size, so whoever made it has the communicator."""
    with pytest.raises(TypeError, match=r"comm is object, expected a Communicator: make it by as_communicator"):
        carry(ring_allreduce(ONES, 0, 1), object())


ONE_RANK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from mpi4py import MPI
from test_any_group import COLLECTIVES, ONES
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for group in (MPI.COMM_WORLD, dist.group.WORLD, None):
    for name, collective in COLLECTIVES.items():
        assert collective(group).tolist() == ONES.tolist(), name
"""


def test_groups_of_one_rank(pytestconfig):
    """In a process of its own, where mpi4py is imported."""
    command = [sys.executable, "-c", ONE_RANK, str(pytestconfig.rootpath / "packages/communicators/tests")]
    launched = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert launched.returncode == 0, launched.stderr
