"""Links that go dark in the midst of training, or change bits: the same error on all ranks, in time, and an end."""

import json
import re
import sys
import threading
import time

import pytest
from communicators.background.control import ABORT_SECONDS
from slow_link import SlowLink, missing

LACKING = missing()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no emulated link here: {'; '.join(LACKING)}")

TIMEOUT = 3.0
TRAINS = """
import pathlib, sys, time
import torch
from communicators import CollectiveError, allreduce, as_communicator, leave
world, native, begun, timeout = sys.argv[1], sys.argv[2] == "native", pathlib.Path(sys.argv[3]), float(sys.argv[4])
if world == "mpi":
    from mpi4py import MPI
else:
    import datetime, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
comm = as_communicator(None, timeout=timeout)
try:
    for step in range(100_000):
        allreduce(torch.ones(1 << 18 if native else 1000), comm, native=native)  # gloo sums no short ones
        if step == 20 and comm.rank == 0:
            begun.touch()
        time.sleep(0.01)
except CollectiveError as error:
    print(f"{comm.rank}|{time.monotonic()}|{error}", flush=True)
    if world == "mpi" and leave(timeout=2.0):
        MPI.COMM_WORLD.Abort(1)
    raise SystemExit(1)
"""


def train_behind_a_link_that_goes_dark(world, native, dark, tmp_path):
    """Of each rank: seconds from the darkness to its error, and what that said; seconds until all had ended."""
    script, begun, since = tmp_path / "trains.py", tmp_path / "begun", []
    script.write_text(TRAINS)
    command = [sys.executable, str(script), world, native, str(begun), str(TIMEOUT)]
    with SlowLink(ranks=3, mbit_per_second=100, milliseconds=1.0) as link:

        def darken():
            while not begun.exists():
                time.sleep(0.05)
            link.darken(dark)
            since.append(time.monotonic())

        threading.Thread(target=darken, daemon=True).start()
        if world == "mpi":
            printed = link.mpiexec(command, timeout=100).stdout
        else:
            printed = "".join(done.stdout for done in link.processes(command, timeout=100))
        ended = time.monotonic() - since[0]
    lines = [line.split("|", 2) for line in printed.splitlines() if line.count("|") == 2]
    return {int(rank): (float(when) - since[0], reason) for rank, when, reason in lines}, ended


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "native", "dark"),
    [
        ("gloo", "native", 0),
        ("gloo", "ours", 2),
        pytest.param("mpi", "native", 2, marks=[pytest.mark.mpi, pytest.mark.mpich]),
        pytest.param("mpi", "ours", 0, marks=[pytest.mark.mpi, pytest.mark.mpich]),
    ],
)
def test_every_rank_raises_in_time_and_ends(world, native, dark, tmp_path):
    """Rank 0 holds the Store, and is the arbiter, for which the others wait before the next one decides."""
    errors, ended = train_behind_a_link_that_goes_dark(world, native, dark, tmp_path)
    assert {0, 1, 2} - set(errors) <= ({dark} if world == "mpi" else set())  # whom the others may have ended before
    assert max(seconds for seconds, _ in errors.values()) < TIMEOUT + ABORT_SECONDS + 2  # the machine may be busy
    assert len({reason for rank, (_, reason) in errors.items() if rank != dark}) == 1
    assert all("timed out after 3 s" in reason for _, reason in errors.values())
    assert ended < 20


SUMS = """
import sys, zlib
import torch
from communicators import CollectiveError, allreduce, as_communicator, leave
from sparse_collectives import sparse_allreduce_array
world, algorithms = sys.argv[1], sys.argv[2:]
if world == "mpi":
    from mpi4py import MPI
else:
    import torch.distributed as dist
    dist.init_process_group("gloo")
comm = as_communicator(None, timeout=20)
try:
    for step in range(100):
        x, algorithm = torch.randn(60_000), algorithms[step % 2]
        if algorithm == "dense":
            total = allreduce(x, comm, native=False)
        else:
            total = sparse_allreduce_array(x, comm, k=6000, algorithm=algorithm).total
        print(f"{comm.rank}|{step}|{zlib.crc32(total.numpy()):08x}", flush=True)
except CollectiveError as error:
    print(f"{comm.rank}|error|{error}", flush=True)
    if world == "mpi" and leave(timeout=2.0):
        MPI.COMM_WORLD.Abort(1)
    raise SystemExit(1)
"""


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("world", "algorithms"),
    [
        ("gloo", ("topk-dsa", "spardl")),
        pytest.param("mpi", ("dense", "spardl"), marks=[pytest.mark.mpi, pytest.mark.mpich]),
    ],
)
def test_flipped_bits_never_make_ranks_differ(world, algorithms, tmp_path):
    """In one of forty large packets. Totals are compared up to the error, which all ranks raise."""
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    command = [sys.executable, str(script), world, *algorithms]
    with SlowLink(ranks=3, mbit_per_second=200, milliseconds=0.2, flip_every=40) as link:
        if world == "mpi":
            printed = link.mpiexec(command, timeout=100).stdout
        else:
            printed = "".join(done.stdout for done in link.processes(command, timeout=100))
    said, printed = {}, re.sub(r"([0-2]\|(?:error|\d+)\|)", r"\n\1", printed)  # mpiexec may join two ranks' lines
    for rank, what, value in [line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2]:
        said.setdefault(what, {})[rank] = value
    assert all(len(set(values.values())) == 1 for values in said.values()), json.dumps(said, indent=1)  # whole
    assert len(said["error"]) == 3
    assert next(iter(said["error"].values())).startswith("corrupted")
