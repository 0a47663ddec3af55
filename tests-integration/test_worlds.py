"""Real ranks that raise, die, never come or meet in other ways; laws and features on real ranks: test_on_ranks.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest


@pytest.mark.mpi
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


RAISES_OR_DIES = """
import os, signal, sys
import torch, torch.distributed as dist
from communicators import allreduce, as_communicator
dist.init_process_group("gloo")
comm = as_communicator(None)
allreduce(torch.ones(3), comm)
if comm.rank == int(sys.argv[2]):
    if sys.argv[1] == "raise":
        raise ValueError("mine")
    os.kill(os.getpid(), signal.SIGKILL)
allreduce(torch.ones(3), comm)
"""


@pytest.mark.quick
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("how", "returncode", "said"),
    [("raise", 1, "rank {} left (ValueError: mine) while rank"), ("die", -9, "rank {} is gone: its connection was")],
)
def test_gloo_a_rank_that_raises_or_dies_frees_the_others(processes, tmp_path, how, returncode, said, victim):
    """Rank 0 holds the Store, and is the arbiter of reasons."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES_OR_DIES)
    done = processes(3, script, how, victim, timeout=60)
    gone = done.pop(victim)
    assert gone.returncode == returncode, gone.stderr
    for launch in done:
        assert launch.returncode == 1
        assert said.format(victim) in launch.stderr
    assert len({launch.stderr.split("CollectiveError: ")[-1].splitlines()[0] for launch in done}) == 1


EVERY_INIT = """
import os, sys, torch, torch.distributed as dist
from communicators import as_communicator, allreduce
rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
place = {"rank": rank, "world_size": size}
for how in (
    {"store": store, **place},
    {"init_method": f"file://{folder}/meet", **place},
    {"init_method": f"tcp://127.0.0.1:{sys.argv[2]}", **place},
    {"backend": "cpu:gloo", "store": dist.PrefixStore("again", store), **place},
):
    dist.init_process_group(**{"backend": "gloo", **how})
    for _ in range(2):
        comm = as_communicator(None)
        assert allreduce(torch.ones(3), comm).tolist() == [size] * 3
        comm.close()
    dist.destroy_process_group()
print("all of them")
"""


def test_gloo_by_every_way_to_make_a_process_group(processes, free_port, tmp_path):
    script = tmp_path / "inits.py"
    script.write_text(EVERY_INIT)
    for done in processes(2, script, tmp_path, free_port(), timeout=60):
        assert (done.returncode, done.stdout) == (0, "all of them\n"), done.stderr


NEVER_COMES = """
import datetime, time
import torch, torch.distributed as dist
from communicators import allreduce, as_communicator
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
if dist.get_rank() == 1:
    allreduce(torch.ones(3), as_communicator(None))
time.sleep(2)  # alive, and holds the Store, but elsewhere
allreduce(torch.ones(3), as_communicator(None))
"""


def test_gloo_a_rank_that_never_makes_the_first_call(processes, tmp_path):
    """The group's own time-out holds. Whoever comes later does not wait for the rank that has given up either."""
    script = tmp_path / "never.py"
    script.write_text(NEVER_COMES)
    for rank, launch in enumerate(processes(2, script, timeout=40)):
        assert launch.returncode == 1
        assert f"timed out after 1 s: rank {rank} waits for ranks [{1 - rank}] in the first call" in launch.stderr


CLOSED = """
import pathlib
import torch, torch.distributed as dist
from communicators import allreduce, as_communicator
dist.init_process_group("gloo")
comm, closed = as_communicator(None), []
for turn in range(12):
    other, signals = comm.duplicate(), comm.signals(lambda source, value: None)
    for native in (True, False):
        assert (allreduce(torch.ones(7 << 16 * native), other, native=native) == 2.0).all()
    signals.send_all(turn)
    other.close()
    signals.close()
    closed.append((other, signals))
    if turn in (1, 11):
        print(*(len(list(pathlib.Path("/proc/self", what).iterdir())) for what in ("task", "fd")))
assert allreduce(torch.ones(7), comm).tolist() == [2.0] * 7
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux' /proc")
def test_gloo_what_is_closed_leaves_no_threads_and_no_descriptors(processes, tmp_path):
    """Also where its user keeps it. A group has three threads and four descriptors; each turn makes two."""
    script = tmp_path / "closed.py"
    script.write_text(CLOSED)
    for done in processes(2, script, timeout=60):
        assert done.returncode == 0, done.stderr
        before, after = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
        assert all(now < then + 10 for then, now in zip(before, after, strict=True)), done.stdout


AGAIN = """
import os
import torch, torch.distributed as dist
from communicators import CollectiveError, allreduce, as_communicator
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
for turn in range(2):
    group = dist.ProcessGroup(dist.PrefixStore("ours", store), rank, size)  # the same keys again
    dist.distributed_c10d._world.pg_map[group] = "gloo", dist.PrefixStore("ours", store)  # asked before torch 2.9
    comm = as_communicator(group)
    comm.timeout = 20.0
    allreduce(torch.ones(3), comm)
    try:
        allreduce(torch.ones(3 + rank), comm)
    except CollectiveError as error:
        assert str(error).startswith("ranks disagree on call 1: rank 0 calls"), error
    comm.close()
print("over")
"""


def test_gloo_a_store_that_outlives_its_groups(processes, tmp_path):
    """torchrun's does: what earlier groups have written there is not taken for messages of this one."""
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    begin = time.monotonic()
    for done in processes(2, script, timeout=60):
        assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert time.monotonic() - begin < 40


STORE_IS_SILENT = """
import os, pathlib, signal, subprocess, sys, time
import torch.distributed as dist
from communicators import CollectiveError, as_communicator
dist.init_process_group("gloo")
stopped, there = pathlib.Path(sys.argv[1]), pathlib.Path(f"{sys.argv[1]}-there")
if dist.get_rank() == 1:
    there.touch()  # its group is made
while not there.exists():
    time.sleep(0.05)
if dist.get_rank() == 0:  # it holds the Store
    stopped.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
while not stopped.exists() or not stopped.read_text():
    time.sleep(0.05)
while pathlib.Path(f"/proc/{stopped.read_text()}/stat").read_text().split()[2] != "T":
    time.sleep(0.05)
begin = time.monotonic()
try:
    as_communicator(None, timeout=2)
except CollectiveError as error:
    print(f"{time.monotonic() - begin}|{error}", flush=True)
finally:  # it goes on once this rank has ended, which does not wait for it either
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {stopped.read_text()}"], **quiet)
"""


def test_gloo_a_store_that_does_not_answer_at_the_first_call(processes, tmp_path):
    script = tmp_path / "silent.py"
    script.write_text(STORE_IS_SILENT)
    zero, one = processes(2, script, tmp_path / "stopped", timeout=60)
    assert (zero.returncode, one.returncode) == (0, 0), one.stderr
    seconds, said = one.stdout.split("|")
    assert float(seconds) < 2 + 2  # the machine may be busy
    assert said.startswith("timed out after 2 s: rank 1 made its first call with this process group, but")


NEVER_COMES_BY_MPI = """
import time
import torch
from mpi4py import MPI
from communicators import CollectiveError, as_communicator
from sparse_collectives import sparse_allreduce_array
world, called, one, other = (MPI.COMM_WORLD.Dup() for _ in range(4))
ways = {
    "call": lambda: sparse_allreduce_array(torch.ones(9), called, k=3, timeout=2),
    "order": lambda: [as_communicator(comm, timeout=2) for comm in ((one, other) if world.rank else (other, one))],
    "as_communicator": lambda: as_communicator(world, timeout=2),
}
for how, first in ways.items():
    MPI.COMM_WORLD.Barrier()
    if how != "order" and world.rank == world.size - 1:
        time.sleep(4)  # alive, but elsewhere
    for _ in range(2):
        begin = time.monotonic()
        try:
            first()
            print(f"{how}|{world.rank}|{time.monotonic() - begin}|made", flush=True)
        except CollectiveError as error:
            print(f"{how}|{world.rank}|{time.monotonic() - begin}|{error}", flush=True)
"""


@pytest.mark.few(0)
@pytest.mark.mpi
def test_mpi_the_first_call_has_its_time_out_and_names_who_is_absent(mpiexec, tmp_path):
    """And nobody is caught by a later call that the others do not expect."""
    script = tmp_path / "never.py"
    script.write_text(NEVER_COMES_BY_MPI)
    launch = mpiexec(3, script, timeout=60)
    assert launch.returncode == 0, launch.stderr
    lines = [line.split("|") for line in launch.stdout.splitlines()]
    assert [line[0] for line in lines] == ["call"] * 6 + ["order"] * 6 + ["as_communicator"] * 6
    for how, rank, seconds, said in lines:
        assert float(seconds) < 2 + 2, launch.stdout  # the machine may be busy
        if how == "order":
            absent = {"0": "[1, 2]", "1": "[0]", "2": "[0]"}[rank]
        elif rank == "2":
            continue  # it comes when the others have given up
        else:
            absent = "[2]"
        assert f"timed out after 2 s: rank {rank} waits for ranks {absent} in the first call" in said


MANY = """
import torch
from mpi4py import MPI
from communicators import allreduce, as_communicator
world = MPI.COMM_WORLD
taken = [world.Dup() for _ in range(1800)]  # of MPI's 2,048
for turn in range(100):  # three each
    comm = world.Dup()
    assert allreduce(torch.ones(1), as_communicator(comm), native=False).item() == 2
    comm.Free()
comms = [world.Dup() for _ in range(120)]
made = 0
try:
    for made, comm in enumerate(comms):
        as_communicator(comm)
except RuntimeError as error:
    print(f"{made}|{error}".splitlines()[0], flush=True)
"""


@pytest.mark.quick
@pytest.mark.mpi
def test_mpi_communicators_end_with_those_that_they_were_made_for(mpiexec, tmp_path):
    """What is never freed ends with an error that says so."""
    script = tmp_path / "many.py"
    script.write_text(MANY)
    launch = mpiexec(2, script)
    assert launch.returncode == 0, launch.stderr
    for line in launch.stdout.splitlines():
        made, said = line.split("|")
        assert int(made) > 30
        assert said.startswith("MPI gives no further communicator")


RAW_GROUPS = """
import torch
import torch.distributed as dist
from mpi4py import MPI
from communicators import allgather, allreduce, allreduce_async, barrier, broadcast, measure_link
from replicas import refuse_unlike
world = MPI.COMM_WORLD
address = world.bcast(None if world.rank else ADDRESS)
dist.init_process_group("gloo", address, rank=world.rank, world_size=world.size)
for group in (world, dist.group.WORLD, None):
    x = torch.full((2,), 1.0 + world.rank)
    for total in (allreduce(x, group), allreduce(x, group, native=False), allreduce_async(x, group).wait()):
        assert total.tolist() == [3.0, 3.0]
    assert [part.tolist() for part in allgather(x, group)] == [[1.0, 1.0], [2.0, 2.0]]
    assert broadcast(x, group, root=1).tolist() == [2.0, 2.0]
    refuse_unlike({"x": torch.ones(2)}, group)
    assert measure_link(group, nbytes=4096, repeats=1).beta >= 0
    barrier(group)
dist.destroy_process_group()
"""


@pytest.mark.mpi
def test_dense_collectives_take_the_groups_themselves(mpiexec, free_port, tmp_path):
    script = tmp_path / "raw.py"
    script.write_text(RAW_GROUPS.replace("ADDRESS", repr(f"tcp://127.0.0.1:{free_port()}")))
    launch = mpiexec(2, script, timeout=60)
    assert launch.returncode == 0, launch.stderr
