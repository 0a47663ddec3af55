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


@pytest.mark.few(1)
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
        assert said in launch.stderr.split("CollectiveError: ")[-1].splitlines()[0], launch.stderr


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


@pytest.mark.few(1)
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


JOINS = """
import io, os, signal, sys
import torch, torch.distributed as dist
from communicators import as_communicator
from partial_collectives import PartialAllreduce
me = int(os.environ.pop("RANK"))  # 3 comes in place of 2
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), int(os.environ.pop("WORLD_SIZE")), me == 0)

def part(generation, rank, steps, state, total):
    dist.init_process_group("gloo", store=dist.PrefixStore(generation, store), rank=rank, world_size=3)
    comm = as_communicator(None, timeout=60)
    with PartialAllreduce(torch.zeros(1), comm, quorum="solo", on_death="shrink") as partial:
        if state is not None:
            partial.load_state_dict(state, joins=me == 3)
        for step in range(steps):
            if (me, step) == (2, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            total += sum(result.total.item() for result in partial.allreduce(torch.ones(1)))
        total += sum(result.total.item() for result in partial.synchronize())
        state = partial.state_dict()
    comm.close()
    dist.destroy_process_group()
    return state, total

if me == 3:
    state, total = torch.load(io.BytesIO(store.get("state")))
else:
    state, total = part("first", me, 10, None, 0.0)
if me == 0:
    saved = io.BytesIO()
    torch.save((state, total), saved)
    store.set("state", saved.getvalue())
_, end = part("second", min(me, 2), 7, state, total)
sys.stdout.write(f"{total} {end}")
"""


def test_gloo_another_process_joins_in_place_of_one_that_was_killed(processes, tmp_path):
    """In a new process group, because gloo connects the ranks of a group once; from the state of rank 0."""
    script = tmp_path / "joins.py"
    script.write_text(JOINS)
    done = processes(4, script, timeout=60)
    assert done.pop(2).returncode == -9
    assert [launch.returncode for launch in done] == [0] * 3, [launch.stderr for launch in done]
    assert len({launch.stdout for launch in done}) == 1
    before, end = map(float, done[0].stdout.split())
    assert 20 <= before <= 25
    assert end == before + 21


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
import torch
from communicators import CollectiveError, as_communicator
from partial_collectives import PartialAllreduce
if sys.argv[1] == "mpi":
    from mpi4py import MPI
else:
    import torch.distributed as dist
    dist.init_process_group("gloo")
comm, caught = as_communicator(None, timeout=60), pathlib.Path(sys.argv[2])

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored

def interrupt(main):
    names = set()
    while "wait_until" not in names:  # it waits in allreduce
        time.sleep(0.01)
        frame, names = sys._current_frames()[main], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
    os.kill(os.getpid(), signal.SIGINT)

begin = 0.0
try:
    with PartialAllreduce(torch.zeros(10), comm, quorum=3) as partial:
        for step in range(6):
            if step == 5 and comm.rank == 1:
                threading.Thread(target=interrupt, args=[threading.get_ident()]).start()
            while step == 5 and comm.rank == 0 and not caught.exists():  # so that the others wait
                time.sleep(0.01)
            begin = time.monotonic()
            partial.allreduce(torch.ones(10))
except BaseException as error:
    caught.touch()
    sys.stdout.write(f"{comm.rank}|{time.monotonic() - begin < 10}|{type(error).__name__}: {error}\\n")
    sys.stdout.flush()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("world", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_an_interrupt_in_the_middle_of_an_allreduce(processes, mpiexec, tmp_path, world):
    """It reaches the user, whose process ends; the others err with one reason within seconds."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    if world == "mpi":
        done = [mpiexec(3, script, world, tmp_path / "caught", timeout=60)]
    else:
        done = processes(3, script, world, tmp_path / "caught", timeout=60)
    assert [launch.returncode for launch in done] == [0] * len(done), [launch.stderr for launch in done]
    said = dict(line.split("|", 1) for launch in done for line in launch.stdout.splitlines())
    assert said["1"] == "True|KeyboardInterrupt: "
    assert said["0"] == said["2"] == "True|CollectiveError: rank 1 gave up its partial allreduce: KeyboardInterrupt"


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
