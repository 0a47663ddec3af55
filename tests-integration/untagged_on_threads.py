"""The law and failure cases over a line without tags; the ranks are threads, which is cheaper than processes.

usage: python untagged_on_threads.py REPORT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import dense_cases
import sparse_cases
import torch
import torch.distributed as dist
from communicators import CollectiveError, Round, body, frame, framed_nbytes, run, start
from communicators import dense_schedules as schedules
from communicators.background.transport_communicator import TransportCommunicator
from communicators.worlds.nccl.untagged import UntaggedTransport
from communicators.worlds.process_group import Meeting, ProcessGroupTransport
from untagged_gloo import UntaggedGloo

SIZES = (2, 3)


def sizes_that_depend_on_data(comm):
    """They go by the tagged transport, between rounds that do not."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def schedule():
        got = []
        for bounded in (False, True, False):
            x = torch.full((comm.rank + 1 if bounded else 5,), float(comm.rank))
            received = yield Round({after: frame(x)}, {before: framed_nbytes(5, x.dtype)}, bounded=bounded)
            got += body(received[before], x.dtype).tolist()
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
    line, exchange = comm.transport.line, comm.transport.line.exchange
    line.exchange = lambda sends, recvs: Delayed(exchange(sends, recvs), until=time.monotonic() + 0.2)
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
    received = yield Round({after: frame(torch.tensor([comm.rank]))}, {before: framed_nbytes(1, torch.int64)})
    return body(received[before], torch.int64).tolist()


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
        yield Round({(comm.rank + 1) % comm.size: frame(torch.ones(3))}, {(comm.rank - 1) % comm.size: 28})
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("by hand")
        yield Round({(comm.rank + 1) % comm.size: frame(torch.ones(3))}, {(comm.rank - 1) % comm.size: 28})

    run(schedule(), comm, facts="broken")


def a_launch_that_fails(comm):
    """On one rank, where some of the round may be in flight: it gives up its line, and the others theirs."""

    def exchange(sends, recvs):
        raise MemoryError("no room")

    if comm.rank == comm.size - 1:
        comm.transport.line.exchange = exchange
    run(schedules.ring_allreduce(torch.ones(9), comm.rank, comm.size), comm)


LEFT_OUT = (
    dense_cases.background_leaves_others_alone,  # needs processes, as the next three
    dense_cases.a_subset_first,
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


def outcome_of(case, store, rank, size):
    """In the thread of one rank."""
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, size)
    dist.distributed_c10d._world.pg_map[group] = "gloo", dist.PrefixStore("group", store)  # asked before torch 2.9
    line = UntaggedGloo(dist.PrefixStore("line", store), rank, size)
    comm = TransportCommunicator(UntaggedTransport(ProcessGroupTransport(Meeting.of(group, "here")), line))
    begin, outcome = time.monotonic(), {}
    try:
        case(comm)
        comm.close()
    except CollectiveError as error:
        outcome["reason"] = str(error).replace(" on cpu", "")  # the facts of an untagged call name the device
    except BaseException:
        outcome["error"] = traceback.format_exc()
    return {**outcome, "seconds": time.monotonic() - begin}


def outcomes_of(case, size):
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(lambda rank: outcome_of(case, store, rank, size), range(size)))


def main(report):
    outcomes = {size: {} for size in SIZES}
    for size in SIZES:
        for case in LAWS:
            outcomes[size][case.__name__] = outcomes_of(case, size)
    with ThreadPoolExecutor(16) as side_by_side:  # they mostly wait
        failures = [(size, case, side_by_side.submit(outcomes_of, case, size)) for size in SIZES for case in FAILURES]
        for size, case, future in failures:
            outcomes[size][case.__name__] = future.result()
    with open(report, "w") as file:
        json.dump(outcomes, file)
    os._exit(0)  # without departing: threads of one process do not leave one after the other


if __name__ == "__main__":
    main(sys.argv[1])
