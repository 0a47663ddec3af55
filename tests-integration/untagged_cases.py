"""What a line without tags or lengths has to do besides, as NCCL is one; for on_ranks.py."""

from __future__ import annotations

import time

import dense_cases
import sparse_cases
import torch
from communicators import Payload, Round, run, schedules, start


def sizes_that_depend_on_data(comm):
    """They go by the tagged transport, between rounds that do not."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def schedule():
        got = []
        for bounded in (False, True, False):
            x = torch.full((comm.rank + 1 if bounded else 5,), float(comm.rank))
            received = yield Round({after: Payload.of(x)}, {before: 5 * x.dtype.itemsize}, bounded=bounded)
            got += received[before].view(x.dtype).tolist()
        return got

    assert run(schedule(), comm) == [float(before)] * (5 + before + 1 + 5)


def calls_go_one_after_the_other(comm):
    """A call in the foreground waits for those that were started before it."""
    x = torch.ones(1000)
    works = [start(schedules.ring_allreduce(x * i, comm.rank, comm.size), comm) for i in range(4)]
    total = run(schedules.halving_doubling_allreduce(x, comm.rank, comm.size), comm)
    assert all(work.is_completed() for work in works)
    assert torch.equal(total, x * comm.size)
    assert [work.wait()[0].item() for work in works] == [i * comm.size for i in range(4)]


def waiting_for_ones_turn_is_no_time_out(comm):
    """Six calls of 0.2 s each; nobody is late, so 0.6 s are enough for each."""
    line, sendrecv = comm.transport.line, comm.transport.line.sendrecv
    line.sendrecv = lambda sends, recvs: Delayed(sendrecv(sends, recvs), until=time.monotonic() + 0.2)
    works = [start(shift(comm), comm, timeout=0.6) for _ in range(6)]
    begin = time.monotonic()
    assert [work.wait() for work in works] == [[(comm.rank - 1) % comm.size]] * 6
    assert time.monotonic() - begin > 1.0


class Delayed:
    def __init__(self, launched, until):
        self.launched, self.until = launched, until

    def is_completed(self):
        return self.launched.is_completed() and time.monotonic() > self.until

    def wait(self):
        self.launched.wait()


def shift(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = yield Round({after: Payload.of(torch.tensor([comm.rank]))}, {before: 8})
    return received[before].view(torch.int64).tolist()


def other_order_in_background(comm):
    """Of calls that all ranks have agreed on before, and of one size: only their facts tell them apart."""
    calls = [lambda name=name: start(schedules.ring_allreduce(torch.ones(8), comm.rank, comm.size), comm, facts=name)
             for name in "ab"]  # fmt: skip
    for call in calls:
        call().wait()
    works = [call() for call in (reversed(calls) if comm.rank == comm.size - 1 else calls)]
    for work in works:
        work.wait()


def a_rank_leaves_a_round(comm):
    """The others have launched messages that nobody will match."""

    def schedule():
        yield Round({(comm.rank + 1) % comm.size: Payload.of(torch.ones(3))}, {(comm.rank - 1) % comm.size: 12})
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("by hand")
        yield Round({(comm.rank + 1) % comm.size: Payload.of(torch.ones(3))}, {(comm.rank - 1) % comm.size: 12})

    run(schedule(), comm, facts="broken")


def a_launch_that_fails(comm):
    """On one rank, where some of the round may be in flight: it gives up its line, and the others theirs."""

    def sendrecv(sends, recvs):
        raise MemoryError("no room")

    if comm.rank == comm.size - 1:
        comm.transport.line.sendrecv = sendrecv
    run(schedules.ring_allreduce(torch.ones(9), comm.rank, comm.size), comm)


LEFT_OUT = (
    dense_cases.background_leaves_others_alone,  # calls go one after the other here
    dense_cases.a_subset_first,  # of tagged groups, as the next
    dense_cases.closed_and_made_again,
    sparse_cases.training_has_the_bits_of_the_simulated_world,  # nothing new to a transport, and the longest
)
LAWS = [case for case in [*dense_cases.LAWS, *sparse_cases.LAWS] if case not in LEFT_OUT]
LAWS += [sizes_that_depend_on_data, calls_go_one_after_the_other, waiting_for_ones_turn_is_no_time_out]
FAILURES = {
    **dense_cases.FAILURES,
    **sparse_cases.FAILURES,
    # Both calls differ, and both are in flight: which is told depends on whose agreement ends first.
    other_order_in_background: (
        "ranks disagree on call 2: rank 0 calls a, rank {last} calls b",
        "ranks disagree on call 3: rank 0 calls b, rank {last} calls a",
    ),
    a_launch_that_fails: "rank {last} failed in ring_allreduce: MemoryError: no room",
    a_rank_leaves_a_round: "rank {last} failed in broken: ZeroDivisionError: by hand",
}
