"""Partial rounds on real ranks when one of them dies or leaves; what holds otherwise is in `partial_cases`."""

from __future__ import annotations

import pytest

DIES_OR_LEAVES = """
import os, signal, sys, time
import torch, torch.distributed as dist
from communicators import as_communicator
from partial_collectives import PartialAllreduce
dist.init_process_group("gloo")
how, victim, quorum = sys.argv[1], int(sys.argv[2]), sys.argv[3]
comm = as_communicator(None, timeout=60)
partial = PartialAllreduce(torch.zeros(100), comm, quorum=quorum, max_staleness=1000)
for step in range(10_000):
    if comm.rank == victim and step == 5:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    time.sleep(1e-3)
    partial.allreduce(torch.ones(100))
"""


@pytest.mark.parametrize(
    ("how", "quorum", "returncode", "said"),
    [
        ("die", "solo", -9, "rank 1 is gone: its connection was"),
        ("die", "majority", -9, "rank 1 is gone: its connection was"),
        ("leave", "majority", 0, "rank 1 left (it exited) while rank"),
    ],
)
def test_gloo_a_rank_that_dies_or_leaves_is_named_by_the_others(processes, tmp_path, how, quorum, returncode, said):
    script = tmp_path / "dies.py"
    script.write_text(DIES_OR_LEAVES)
    done = processes(3, script, how, 1, quorum, timeout=45)  # less than their time-out
    assert done.pop(1).returncode == returncode
    for launch in done:
        assert launch.returncode == 1, launch.stderr
        assert said in launch.stderr.splitlines()[-1], launch.stderr


SHRINKS = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
from communicators import as_communicator
from partial_collectives import PartialAllreduce
dist.init_process_group("gloo")
victim, quorum, draw = int(sys.argv[1]), sys.argv[2], random.Random(os.environ["RANK"])
comm = as_communicator(None, timeout=60)
got = []
with PartialAllreduce(torch.zeros(2, dtype=torch.int64), comm, quorum=quorum, on_death="shrink") as partial:
    for step in range(40):
        time.sleep(draw.choice([0.0, 1e-3, 4e-3]))
        if comm.rank == victim and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        got += partial.allreduce(torch.full((2,), 1000**comm.rank))
    got += partial.finish()
total = sum(result.total[0].item() for result in got)
rounds = [(result.round, result.total.tolist(), result.contributors, result.members) for result in got]
print("|".join([str(total), str(len(got[-1].members)), str(hash(str(rounds)))]))
"""


@pytest.mark.parametrize(("victim", "quorum"), [(0, "majority"), (1, "solo")])
def test_gloo_the_others_go_on_without_a_rank_that_is_killed(processes, tmp_path, monkeypatch, victim, quorum):
    """All that they give arrives once, on both alike; of its own what was in a round. Rank 0 holds the Store."""
    script = tmp_path / "shrinks.py"
    script.write_text(SHRINKS)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    done = processes(3, script, victim, quorum, timeout=45)
    assert done.pop(victim).returncode == -9
    for launch in done:
        assert launch.returncode == 0, launch.stderr
    assert done[0].stdout == done[1].stdout
    total, members, _ = done[0].stdout.split("|")
    arrived = [int(total) // 1000**rank % 1000 for rank in range(3)]
    assert members == "2"
    assert 1 <= arrived.pop(victim) <= 20
    assert arrived == [40, 40]


NO_THREADS = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
import torch
from partial_collectives import PartialAllreduce
try:
    PartialAllreduce(torch.zeros(3), MPI.COMM_WORLD)
except RuntimeError as error:
    print(f"refused: {error}")
try:
    PartialAllreduce(torch.zeros(3), MPI.COMM_WORLD, on_death="shrink")
except ValueError as error:
    print(f"refused: {error}")
"""


@pytest.mark.mpi
def test_mpi_without_threads_and_shrinking_are_refused_with_what_to_do(mpiexec, tmp_path):
    script = tmp_path / "funneled.py"
    script.write_text(NO_THREADS)
    launch = mpiexec(2, script, timeout=60)
    assert launch.returncode == 0, launch.stderr
    assert launch.stdout.count("refused: ") == 4, launch.stdout
    assert launch.stdout.count("THREAD_MULTIPLE") == 2
    assert launch.stdout.count("under MPI the launcher ends the whole job") == 2
