"""Dense collectives, background work and failures on real ranks; for on_ranks.py."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from communicators import (
    CollectiveError,
    Payload,
    Round,
    allgather,
    allreduce,
    allreduce_async,
    as_communicator,
    barrier,
    broadcast,
    measure_paths,
    run,
    schedules,
    shares_by_rate,
    start,
    testing,
)


def integers(comm, seed, numel):
    """The same inputs on every rank, one for each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (numel,), generator=generator).float() for _ in range(comm.size)]


def dense_laws(comm):
    for schedule in (schedules.ring_allreduce, schedules.halving_doubling_allreduce, schedules.doubling_allreduce):
        for numel in (0, 1, 7, 1000):
            testing.check_laws(
                lambda c, x, schedule=schedule: run(schedule(x, c.rank, c.size), c),
                integers(comm, numel, numel),
                comm=comm,
            )


def by_rate_laws(comm):
    """With unequal shares, in one segment and in several; and paths are the same on all ranks."""
    shares = [2 * rank / (comm.size * (comm.size - 1)) if comm.size > 1 else 1.0 for rank in range(comm.size)]
    for numel in (0, 1, 7, 1000, 1 << 18):
        testing.check_laws(
            lambda c, x: run(schedules.by_rate_allreduce(x, c.rank, c.size, shares), c),
            integers(comm, numel, numel),
            comm=comm,
        )
    paths = measure_paths(comm, nbytes=1 << 12, repeats=1)
    told = torch.tensor([*paths.up, *paths.down], dtype=torch.float64)
    assert all(torch.equal(each, told) for each in allgather(told, comm))
    schedules.check_shares(shares_by_rate(paths.slower), comm.size)


def dense_calls(comm):
    x = integers(comm, 5, 33)
    for long in (x, integers(comm, 5, (1 << 18) + 1)):  # by the transport's own sum
        assert torch.equal(allreduce(long[comm.rank], comm), sum(long))
    assert torch.equal(allreduce(x[comm.rank].to(torch.bfloat16), comm).float(), sum(x))
    assert torch.allclose(allreduce(x[comm.rank], comm, average=True), sum(x) / comm.size)
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
    if dist.is_initialized():
        dist.barrier()
    else:
        world(comm).Barrier()
    held = held or [start(late(comm), comm, facts="late")]
    assert torch.equal(allreduce(torch.ones(3), comm), torch.full((3,), float(comm.size)))
    assert held[0].wait(timeout=20) == (comm.rank - 1) % comm.size


def late(comm):
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return source
    received = yield Round({to: Payload.of(torch.tensor([comm.rank]))}, {source: 8})
    return int(received[source].view(torch.int64))


def other_sizes(comm):
    allreduce(torch.ones(5 + (comm.rank == comm.size - 1)), comm, native=False)


def other_order(comm, native=False):
    """Two agreed calls, in another order on the last rank: a message of one must not match the other."""
    more = 1 << 18 if native else 0  # gloo sums no short ones
    a, b = torch.ones(10 + more), torch.ones(500 + more, dtype=torch.int32)
    for x in (a, b):
        allreduce(x, comm, native=native)
    pair = (b, a) if comm.rank == comm.size - 1 else (a, b)
    for x in pair:
        allreduce(x, comm, native=native)


def other_order_of_native_sums(comm):
    other_order(comm, native=True)


def late_rank(comm):
    if comm.rank == comm.size - 1:
        time.sleep(2.5)
    run(schedules.ring_allreduce(torch.ones(9), comm.rank, comm.size), comm, timeout=1.0)


def error_in_schedule(comm):
    def schedule():
        yield Round()
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("by hand")
        yield Round(recvs={comm.size - 1: 64})

    run(schedule(), comm, facts="broken")


def error_in_background(comm):
    def schedule():
        yield Round()
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("by hand")
        yield Round(recvs={comm.size - 1: 64})

    work = start(schedule(), comm, facts="broken")
    with contextlib.suppress(RuntimeError):  # torch wraps what a callback raises; the work raises it as it is
        work.get_future().wait()
    work.wait()


def a_subset_first(comm):
    """Ranks that are in other groups than the rest still find each other."""
    if dist.is_initialized():
        subset = dist.new_group(list(range(1, comm.size)))
        everybody = dist.new_group()
    else:
        subset, everybody = world(comm).Split(color=int(comm.rank > 0)), world(comm).Dup()
    if comm.rank > 0:
        assert allreduce(torch.ones(1), as_communicator(subset)).item() == comm.size - 1
    assert allreduce(torch.ones(1), as_communicator(everybody)).item() == comm.size


def closed_and_made_again(comm):
    """A closed communicator says so; the same group gets a new one, as often as one likes."""
    group = dist.new_group() if dist.is_initialized() else world(comm).Dup()
    for _ in range(3):
        again = as_communicator(group)
        assert comm.size == 1 or again is as_communicator(group)
        work = start(schedules.ring_allreduce(torch.ones(5), comm.rank, comm.size), again)
        assert torch.equal(work.wait(), torch.full((5,), float(comm.size)))
        again.close()
        again.close()
        if comm.size > 1:
            with pytest.raises(CollectiveError, match="this communicator is closed"):
                allreduce(torch.ones(1), again)


def inputs_changed_after_the_start(comm):
    """Large enough that the engine has not begun when the caller writes."""
    for turn in range(20):
        x = torch.full((300_000,), 1.0)
        work = allreduce_async(x, comm)
        x.fill_(100.0 + turn)
        assert bool((work.wait() == comm.size).all())


def duplicates(comm):
    """Calls on one come in any order to those on the other, and count for both; an error of one leaves the other."""
    other = comm.duplicate()
    sent = [comm.bytes_sent]
    for c in (comm, other):
        allreduce(torch.ones(7), c, native=False)
        sent.append(comm.bytes_sent)
    assert sent[1] - sent[0] == sent[2] - sent[1] > 0 or comm.size == 1
    calls = [lambda c=c, x=x: (c, x, allreduce_async(torch.full((5,), x), c)) for c, x in ((comm, 1.0), (other, 10.0))]
    for c, x, work in [call() for call in (calls if comm.rank % 2 else reversed(calls))]:
        assert (c is comm) == (x == 1.0)
        assert work.wait(timeout=20).tolist() == [x * comm.size] * 5
    if comm.size > 1:
        with pytest.raises(CollectiveError, match="ranks disagree"):
            allreduce(torch.ones(2 + comm.rank), other)
    other.close()
    again = comm.duplicate()
    assert allreduce(torch.ones(1), again).item() == allreduce(torch.ones(1), comm).item() == comm.size
    again.close()


def signals_come(comm):
    """What was sent before close(), between calls and without any; `on_signal` may answer."""
    signals = comm.signals()
    peers = [(comm.rank + value) % comm.size for value in range(300)]
    for value, peer in enumerate(peers):
        signals.send(peer, value)
    allreduce(torch.ones(3), comm)
    signals.send_all(-1)
    signals.close()
    expected = {(source, value) for source in range(comm.size) for value in range(300)}
    expected = {(source, value) for source, value in expected if (source + value) % comm.size == comm.rank}
    got = signals.poll()
    assert set(got) == expected | {(source, -1) for source in range(comm.size) if source != comm.rank}
    assert len(got) == len(set(got))


def signals_are_answered(comm):
    """While every rank is busy elsewhere."""
    answers, all_there = set(), threading.Event()

    def on_signal(source, value):
        if value:
            signals.send(source, 0)
        else:
            answers.add(source)
            if len(answers) == comm.size - 1:
                all_there.set()

    signals = comm.signals(on_signal)
    signals.send_all(1)
    assert comm.size == 1 or all_there.wait(20)
    signals.close()


def world(comm):
    """As many of MPI's ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(range(comm.size)))


LAWS = [
    dense_laws,
    by_rate_laws,
    dense_calls,
    background,
    background_leaves_others_alone,
    a_subset_first,
    closed_and_made_again,
    inputs_changed_after_the_start,
    duplicates,
    signals_come,
    signals_are_answered,
]
FAILURES = {
    other_sizes: "ranks disagree on call 0: rank 0 calls allreduce(shape=(5,), torch.float32), rank {last} "
    "calls allreduce(shape=(6,), torch.float32)",
    other_order: "ranks disagree on call 2",
    other_order_of_native_sums: "ranks disagree on call 2",
    late_rank: "timed out after 1 s: rank",
    error_in_schedule: "rank {last} failed in broken: ZeroDivisionError: by hand",
    error_in_background: "rank {last} failed in broken: ZeroDivisionError: by hand",
}
