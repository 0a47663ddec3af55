"""One trace of all ranks, over gloo and MPI, of every kind of training, with arrows from send to receive."""

from __future__ import annotations

import json

import pytest
import torch
from communicators import Dies, Elastic, SimulatedWorld, allreduce, timeline
from traces import arrows, bars, check_trace

TRAIN = """
import sys
import time
from functools import partial
import torch
from communicators import allreduce, as_communicator, barrier, tracing
from data_parallel import DistributedOptimizer, UpdateOptimizer
from local_sgd import ALGORITHMS
from partial_collectives import EagerSGD

torch.set_num_threads(1)
comm, folder = as_communicator(make_world()), sys.argv[1]
kinds = {
    "gradients": partial(DistributedOptimizer, comm=comm, density=0.1),
    "overlap": partial(DistributedOptimizer, comm=comm, density=0.1, overlap=True),
    "updates": partial(UpdateOptimizer, comm=comm, density=0.1),
    "local-sgd": lambda inner, named: ALGORITHMS["local-sgd"](inner, comm=comm, sync_every=2),
    "easgd": lambda inner, named: ALGORITHMS["easgd"](inner, comm=comm, sync_every=2),
    "eager": partial(EagerSGD, comm=comm),
}
for kind in sys.argv[2:]:
    model = torch.nn.Linear(100, 100)
    optimizer = kinds[kind](torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def step():
        optimizer.zero_grad()
        with optimizer.ahead() if kind == "updates" else tracing.labelled("backward"):
            model(torch.randn(16, 100)).square().mean().backward()
        optimizer.step()
        if hasattr(optimizer, "average"):
            optimizer.average()

    def steps(count, late):
        for taken in range(count):
            if taken // 4 == comm.rank:  # for longer than the overlap of any kind, so that each has to wait for another
                time.sleep(late)
            step()
        if kind == "eager":  # the others may need a rank that waits elsewhere
            optimizer.synchronize()

    steps(2, late=0.0)
    barrier(comm)
    sent = comm.bytes_sent
    with tracing.recording() as recorded:
        steps(4 * comm.size, late=0.1)
    if hasattr(optimizer, "wait"):
        optimizer.wait()
    sent = comm.bytes_sent - sent
    tracing.write_trace(recorded, f"{folder}/{kind}.json", comm)
    if hasattr(optimizer, "finish"):
        optimizer.finish()
"""
GLOO = "import torch.distributed as dist\ndist.init_process_group('gloo')\nmake_world = lambda: dist.group.WORLD\n"
MPI = "from mpi4py import MPI\nmake_world = lambda: MPI.COMM_WORLD\n"
KINDS = ["gradients", "overlap", "updates", "local-sgd", "easgd", "eager"]


def check(path, size):
    """The trace of all ranks, in which (almost) every message that one side has seen is an arrow."""
    trace = json.loads(path.read_text())
    check_trace(trace)
    found = arrows(trace)
    messages = [one for one in bars(trace) if "key" in one["args"]]
    assert {one["pid"] for one in bars(trace)} == set(range(size))
    assert {(sent["pid"], came["pid"]) for sent, came in found} >= {(0, 1), (1, 0)}
    at_edges = 4 * size * size  # what was under way when a rank began, or ended, to record
    assert len(messages) - 2 * len(found) <= at_edges, (len(messages), len(found))
    for pid in range(size):
        assert any(one["pid"] == pid and one["name"] == "wait" for one in bars(trace))
    assert trace["otherData"]["clock_error_us"] == {f"rank {rank}": 0.0 for rank in range(size)}


@pytest.mark.quick
@pytest.mark.timeout(180)
def test_over_gloo(processes, tmp_path):
    (tmp_path / "train.py").write_text(GLOO + TRAIN)
    for done in processes(3, tmp_path / "train.py", tmp_path, *KINDS):
        assert done.returncode == 0, done.stderr
    for kind in KINDS:
        check(tmp_path / f"{kind}.json", 3)


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_over_mpi_and_its_groups(mpiexec, tmp_path):
    (tmp_path / "train.py").write_text(MPI + TRAIN + GROUPS)
    done = mpiexec(4, tmp_path / "train.py", tmp_path, "gradients", "local-sgd")
    assert done.returncode == 0, done.stderr
    for kind in ("gradients", "local-sgd"):
        check(tmp_path / f"{kind}.json", 4)
    trace = json.loads((tmp_path / "groups.json").read_text())
    check_trace(trace)
    pairs = {(sent["pid"], came["pid"]) for sent, came in arrows(trace)}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}


GROUPS = """
group = as_communicator(MPI.COMM_WORLD.Split(comm.rank // 2))
barrier(group)
with tracing.recording() as recorded:  # both groups make the same calls, by the same numbers
    for _ in range(3):
        allreduce(torch.ones(100), group, native=False)
tracing.write_trace(recorded, f"{folder}/groups.json", comm)
"""


@pytest.mark.quick
def test_ranks_that_an_elastic_group_has_lost_are_not_in_it():
    def body(comm):
        world = Elastic(comm, at_least=2)
        for _ in range(10):
            comm.elapse(0.01)
            world.atomic(lambda: allreduce(torch.ones(10), world, native=False))
        name = f"rank {comm.rank} of the beginning"
        own = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 9, "tid": 1, "ts": 0.0, "dur": 1.0, "args": {}}
        return timeline.gathered(timeline.Recorded([own], 0, 9, "host"), world)

    [trace] = filter(None, SimulatedWorld(3, faults=[Dies(1, at=0.055)]).run(body))
    check_trace(trace)
    assert {one["pid"] for one in bars(trace)} == {0, 1}
    assert {one["name"] for one in bars(trace)} == {"rank 0 of the beginning", "rank 2 of the beginning"}
