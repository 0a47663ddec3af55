"""Runs on real ranks: all cases for one number of ranks inside one launch; rank 0 writes what came of each.

usage, on every rank: python on_ranks.py mpi|gloo REPORT.json
"""

from __future__ import annotations

import json
import sys
import time
import traceback

import torch
import torch.distributed as dist
from communicators import (
    CollectiveError,
    Round,
    allgather,
    allreduce,
    as_communicator,
    barrier,
    body,
    broadcast,
    frame,
    run,
    start,
    testing,
)
from communicators import dense as schedules


class MPIWorld:
    """What the cases need of mpi4py itself."""

    def __init__(self):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def fresh(self):
        return self.comm.Dup()

    def barrier(self):
        self.comm.Barrier()

    def gather(self, outcome):
        return self.comm.gather(outcome)


class GlooWorld:
    """What the cases need of torch.distributed itself."""

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def fresh(self):
        return dist.new_group()

    def barrier(self):
        dist.barrier()

    def gather(self, outcome):
        outcomes = [None] * self.size
        dist.all_gather_object(outcomes, outcome)
        return outcomes


def integers(comm, seed, numel):
    """The same inputs on every rank, one for each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (numel,), generator=generator).float() for _ in range(comm.size)]


def dense_laws(comm):
    for schedule in (schedules.ring_allreduce, schedules.halving_doubling_allreduce):
        for numel in (0, 1, 7, 1000):
            testing.check_laws(
                lambda c, x, schedule=schedule: run(schedule(x, c.rank, c.size), c),
                integers(comm, numel, numel),
                comm=comm,
            )


def dense_calls(comm):
    x = integers(comm, 5, 33)
    assert torch.equal(allreduce(x[comm.rank], comm), sum(x))
    assert torch.equal(allreduce(x[comm.rank].to(torch.bfloat16), comm).float(), sum(x))
    torch.testing.assert_close(allreduce(x[comm.rank], comm, average=True), sum(x) / comm.size)
    assert torch.equal(broadcast(x[comm.rank], comm, root=comm.size - 1), x[-1])
    parts = allgather(torch.full((comm.rank,), 2.0), comm)
    assert [part.tolist() for part in parts] == [[2.0] * rank for rank in range(comm.size)]
    barrier(comm)


def background(comm):
    x = integers(comm, 6, 100)
    works = [start(schedules.ring_allreduce(x[comm.rank] + i, comm.rank, comm.size), comm) for i in range(5)]
    for i, work in reversed(list(enumerate(works))):
        assert torch.equal(work.wait(timeout=20), sum(x) + i * comm.size)
        assert work.is_completed()
    future = start(schedules.ring_allreduce(x[comm.rank], comm.rank, comm.size), comm).get_future()
    assert torch.equal(future.then(lambda done: done.wait() * 2).wait(), sum(x) * 2)


def background_leaves_others_alone(comm):
    """A started exchange that cannot end yet holds up neither the user's own calls nor later calls of ours."""
    held = [start(late(comm), comm, facts="late")] if comm.rank else []
    world.barrier()
    held = held or [start(late(comm), comm, facts="late")]
    assert torch.equal(allreduce(torch.ones(3), comm), torch.full((3,), float(comm.size)))
    assert held[0].wait(timeout=20) == (comm.rank - 1) % comm.size


def late(comm):
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return source
    received = yield Round({to: frame(torch.tensor([comm.rank]))}, {source: 64})
    return int(body(received[source], torch.int64))


def other_sizes(comm):
    return reason(lambda: allreduce(torch.ones(5 + (comm.rank == comm.size - 1)), comm))


def other_order(comm):
    """Two agreed calls, in another order on the last rank: a message of one must not match the other."""
    a, b = torch.ones(10), torch.ones(500)
    for x in (a, b):
        allreduce(x, comm, native=False)
    pair = (b, a) if comm.rank == comm.size - 1 else (a, b)
    return reason(lambda: [allreduce(x, comm, native=False) for x in pair])


def late_rank(comm):
    if comm.rank == comm.size - 1:
        time.sleep(2.5)
    return reason(lambda: run(schedules.ring_allreduce(torch.ones(9), comm.rank, comm.size), comm, timeout=1.0))


def error_in_schedule(comm):
    def schedule():
        yield Round()
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("by hand")
        yield Round(recvs={comm.size - 1: 64})

    return reason(lambda: run(schedule(), comm, facts="broken"))


def error_in_background(comm):
    def schedule():
        yield Round()
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("by hand")
        yield Round(recvs={comm.size - 1: 64})

    work = start(schedule(), comm, facts="broken")
    try:
        work.get_future().wait()
    except RuntimeError:  # torch wraps what a callback raises; the work raises it as it is
        return reason(work.wait)
    return None


def reason(fn):
    try:
        fn()
    except CollectiveError as error:
        return str(error)
    return None


LAWS = [dense_laws, dense_calls, background, background_leaves_others_alone]
FAILURES = [other_sizes, other_order, late_rank, error_in_schedule, error_in_background]


def main(report):
    outcomes = {}
    for case in [*LAWS, *(FAILURES if world.size > 1 else [])]:
        comm = as_communicator(world.fresh())  # a failed one is of no use to the next case
        begin = time.monotonic()
        try:
            outcome = {"reason": case(comm)}
        except BaseException:
            outcome = {"error": traceback.format_exc()}
        outcome["seconds"] = time.monotonic() - begin
        outcomes[case.__name__] = world.gather(outcome)
    if world.rank == 0:
        with open(report, "w") as file:
            json.dump(outcomes, file)


if __name__ == "__main__":
    world = {"mpi": MPIWorld, "gloo": GlooWorld}[sys.argv[1]]()
    main(sys.argv[2])
