"""Where communicators come from, the world of one rank, and the measured link."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from communicators import (
    SLOT_BYTES,
    Link,
    Round,
    SimulatedWorld,
    allreduce,
    as_communicator,
    barrier,
    measure_link,
    run,
    start,
)
from communicators.schedules.dense import ring_allreduce
from communicators.worlds.alone import Alone
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.quick


def test_one_rank_alone():
    comm = Alone()
    x = torch.arange(3.0)
    assert torch.equal(allreduce(x, comm), x)
    assert torch.equal(allreduce(x, comm, native=False), x)
    assert allreduce(x, comm).data_ptr() != x.data_ptr()
    barrier(comm)
    work = start(ring_allreduce(x, 0, 1), comm)
    assert work.is_completed()
    assert torch.equal(work.get_future(work).then(lambda future: future.wait() + 1).wait(), x + 1)
    with pytest.raises(ValueError, match="cannot exchange with rank 1"):
        run((_ for _ in [Round(recvs={1: 16})]), comm)


def test_a_transport_that_is_not_there():
    with pytest.raises(ValueError, match="expected 'host' or 'nccl'"):
        as_communicator(Alone(), transport="tcp")
    with pytest.raises(TypeError, match="a Communicator is connected already"):
        as_communicator(Alone(), connections=2)
    with pytest.raises(ValueError, match="is for a torch process group with NCCL"):
        as_communicator(Alone(), transport="nccl")
    assert as_communicator(Alone(), transport="host").size == 1


def test_connections_of_mpi_are_its_own(monkeypatch):
    world = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Comm=SimpleNamespace, COMM_WORLD=world))
    for comm in (None, world):
        with pytest.raises(TypeError, match=r"connections= is for a torch process group.* MPI has settings of its own"):
            as_communicator(comm, connections=2)


def test_a_communicator_is_itself():
    comm = Alone()
    assert as_communicator(comm) is comm


@pytest.mark.parametrize(
    ("comm", "said"),
    [
        ("world", "expected an mpi4py communicator, a torch process group.* got str$"),
        (dist.GroupMember.NON_GROUP_MEMBER, "this rank is not in that group.* make this call on its members alone"),
        (DeviceMesh.__new__(DeviceMesh), r"got DeviceMesh: give mesh\.get_group\(name\)"),
    ],
)
def test_something_else_is_refused(comm, said):
    with pytest.raises(TypeError, match=said):
        as_communicator(comm)


def lines_of(script):
    """What it prints in a process that no launcher has started."""
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


UNDER_A_LAUNCHER = """
import os
from communicators import as_communicator
for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
    os.environ[variable] = "1"
    assert as_communicator().size == 1
    os.environ[variable] = "4"
    try:
        as_communicator()
    except RuntimeError as error:
        print(str(error).replace("\\n", " "))
    del os.environ[variable]
"""


@pytest.mark.slow
def test_several_ranks_without_a_way_between_them():
    """In a process of its own: this one may have imported mpi4py."""
    told = lines_of(UNDER_A_LAUNCHER)
    assert len(told) == 3
    assert all("mpi4py" in one and "init_process_group" in one for one in told)


UNDER_ANOTHER_MPI = """
import os
from mpi4py import MPI
from communicators import as_communicator
assert as_communicator().size == as_communicator(MPI.COMM_WORLD).size == 1
for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
    os.environ[variable] = "4"
    assert as_communicator(MPI.COMM_SELF).size == 1
    for comm in (None, MPI.COMM_WORLD):
        try:
            as_communicator(comm)
        except RuntimeError as error:
            print(str(error).replace("\\n", " "))
    del os.environ[variable]
os.environ["WORLD_SIZE"] = "4"
assert as_communicator(MPI.COMM_WORLD).size == 1
try:
    as_communicator()
except RuntimeError as error:
    print("torch:", str(error).replace("\\n", " "))
"""


@pytest.mark.mpi
def test_a_launcher_of_another_mpi_than_mpi4pys():
    """Each process would be rank 0 of 1, and train alone."""
    launched = subprocess.run([sys.executable, "-c", UNDER_ANOTHER_MPI], capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr
    *told, by_torch = launched.stdout.splitlines()
    assert len(told) == 6
    for one, launcher in zip(told[::2], ("mpiexec", "mpiexec", "srun"), strict=True):
        assert one.startswith(f"{launcher} started 4 ranks (")
        assert "finds one: the launcher is of another MPI; start them by that MPI's own mpiexec" in one
    assert "torch: torchrun started 4 ranks (WORLD_SIZE), but none of them can reach the others" in by_torch


@pytest.mark.parametrize("size", [2, 3, 8])
def test_measured_link_is_the_link(size):
    link = Link(alpha=2e-3, beta=5e-8)
    for measured in SimulatedWorld(size, link).run(measure_link):
        assert measured.alpha == pytest.approx(link.alpha)
        assert measured.beta == pytest.approx(link.beta)
    assert SimulatedWorld(1, link).run(measure_link) == [Link(0.0, 0.0)]


def test_a_message_grows_until_its_bytes_are_seen():
    """Others on the machine, or a high latency, may take longer than 1 MiB."""
    sizes = []

    def seconds(nbytes):
        sizes.append(nbytes + SLOT_BYTES)
        return 2e-3 if nbytes < 1 << 20 else 1e-9 * nbytes

    [measured, *_] = SimulatedWorld(2).run(lambda comm: measure_link(comm, seconds=seconds))
    assert measured.beta == pytest.approx((4.2e-3 - 2e-3) / (3 << 20), rel=0.01)
    assert set(sizes) == {SLOT_BYTES, 1 << 18, 1 << 20, 1 << 22}
    pairs = {0: (10e-3, 0.0), 2: (50e-6, 8e-9)}  # of a high latency, and of a low rate

    def of_a_pair(rank):
        alpha, beta = pairs[rank // 2 * 2]
        return lambda nbytes: alpha + beta * nbytes

    for measured in SimulatedWorld(4).run(lambda comm: measure_link(comm, seconds=of_a_pair(comm.rank))):
        assert (measured.alpha, measured.beta) == (pytest.approx(10e-3), pytest.approx(8e-9, rel=0.01))
    words = Link(50e-3, 8e-9)  # a long message waits for its receiver's, which takes α
    told = lambda nbytes: words.alpha * (1 + (nbytes > 1 << 17)) + words.beta * nbytes  # noqa: E731
    [measured, *_] = SimulatedWorld(2).run(lambda comm: measure_link(comm, seconds=told))
    assert (measured.alpha, measured.beta) == (pytest.approx(words.alpha, rel=1e-4), pytest.approx(words.beta))
    unlimited = SimulatedWorld(3).run(lambda comm: measure_link(comm, seconds=lambda nbytes: 1e-3))
    assert unlimited == [Link(1e-3, 0.0)] * 3


def test_measure_link_checks_its_arguments():
    with pytest.raises(ValueError, match="expected nbytes >= 32"):
        measure_link(Alone(), nbytes=8)
    assert measure_link(Alone(), nbytes=2 * SLOT_BYTES, repeats=1) == Link(0.0, 0.0)
