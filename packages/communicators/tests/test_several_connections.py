"""Several connections to each peer, over which long messages go in pieces."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from communicators import (
    CollectiveError,
    Elastic,
    Payload,
    Round,
    SimulatedWorld,
    allreduce,
    as_communicator,
    barrier,
    run,
    start,
)
from communicators.schedule import SLOT_BYTES
from communicators.worlds.gloo_group import CONTROL_TAG, PIECE_BYTES, GlooGroup
from ranks_on_threads import on_all

pytestmark = pytest.mark.quick


@pytest.fixture
def make():
    """Makes communicators of ranks that are threads, with these connections of each."""
    made = []

    def of(*connections):
        store, size = dist.HashStore(), len(connections)
        of.groups = groups = [dist.ProcessGroup(rank, size) for rank in range(size)]

        def one(rank, **how):
            return as_communicator(groups[rank], store=store, **how)

        def all_of(hows):
            with ThreadPoolExecutor(size) as pool:
                begun = [pool.submit(one, rank, **how) for rank, how in enumerate(hows)]
                made[:] = [one.exception() or one.result() for one in begun]
            return made

        of.anew = lambda: all_of([{}] * size)
        return all_of([{"timeout": 20, "connections": own} for own in connections])

    yield of
    if not any(isinstance(one, BaseException) for one in made):
        on_all(made, lambda comm: comm.close())


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 2, 5])
def test_messages_of_all_lengths_arrive_as_they_were_sent(make, connections):
    comms = make(*[connections] * 3)
    edges = [0, 1, *(count * PIECE_BYTES - SLOT_BYTES + more for count in (1, 2, 3, 5, 7) for more in (-1, 0, 1))]

    def ring(rank, size, nbytes):
        sent = torch.arange(nbytes).add(rank).byte()
        received = yield Round({(rank + 1) % size: Payload.of(sent)}, {(rank - 1) % size: nbytes})
        return received[(rank - 1) % size].body

    def body(comm):
        works = [start(ring(comm.rank, 3, nbytes), comm, facts=str(nbytes)) for nbytes in edges]
        return [work.wait() for work in works]

    for rank, received in enumerate(on_all(comms, body)):
        for nbytes, one in zip(edges, received, strict=True):
            assert torch.equal(one, torch.arange(nbytes).add((rank - 1) % 3).byte())


def test_what_may_be_shorter_than_its_receiver_says(make):
    comms = make(4, 4)
    most = 6 * PIECE_BYTES

    def one_way(rank, nbytes):
        if rank == 0:
            yield Round({1: Payload.of(torch.arange(nbytes).byte())}, bounded=True)
            return None
        return (yield Round(recvs={0: most}, bounded=True))[0].body

    for nbytes in (0, 1, PIECE_BYTES, 5 * PIECE_BYTES + 1, most):
        facts = str(nbytes)
        received = on_all(
            comms, lambda comm, nbytes=nbytes, facts=facts: run(one_way(comm.rank, nbytes), comm, facts=facts)
        )
        assert torch.equal(received[1], torch.arange(nbytes).byte())


def test_long_messages_go_by_all_of_them(make, monkeypatch):
    counts, work = [], GlooGroup.work

    def counted(self, what, memory, peer, tag, **how):
        made = work(self, what, memory, peer, tag, **how)
        if tag < CONTROL_TAG:
            counts.append((memory.numel(), len(getattr(made, "works", [made]))))
        return made

    comms = make(3, 3)
    monkeypatch.setattr(GlooGroup, "work", counted)
    duplicates = on_all(comms, lambda comm: comm.duplicate())
    x = torch.randn(2 * PIECE_BYTES, generator=torch.Generator().manual_seed(0))
    for these in (comms, duplicates):
        counts.clear()
        for total in on_all(these, lambda comm: allreduce(x * (1 + comm.rank), comm)):
            assert torch.equal(total, x + 2 * x)
        assert counts
        assert {count for _, count in counts} <= {2, 3}
        assert min(nbytes for nbytes, _ in counts) > 2 * PIECE_BYTES
    on_all(duplicates, lambda comm: comm.close())


@pytest.mark.parametrize("connections", [(2, 3), (1, 2), (4, 4, 1)])
def test_unlike_numbers_are_an_error_on_all_ranks_at_once(make, connections):
    begin = time.monotonic()
    for number, error in zip(connections, make(*connections), strict=True):
        assert isinstance(error, CollectiveError)
        ranks = [rank for rank, own in enumerate(connections) if own == number]
        assert f"{number} on ranks {ranks}" in str(error)
        assert str(error).startswith("connections= is ")
    assert time.monotonic() - begin < 10


def test_a_group_in_use_keeps_its_number(make):
    comm, group = make(2, 2)[0], make.groups[0]
    assert as_communicator(group) is comm
    assert as_communicator(group, connections=2) is comm
    with pytest.raises(ValueError, match=r"connections=3, but this process group is in use with 2"):
        as_communicator(group, connections=3)
    with pytest.raises(ValueError, match=r"connections is 0, expected a whole number of TCP connections"):
        as_communicator(group, connections=0)
    with pytest.raises(ValueError, match=r"connections is True, expected"):
        Elastic(dist.HashStore(), connections=True)
    assert as_communicator(group.__class__(0, 1), connections=2).size == 1
    with pytest.raises(TypeError, match=r"connections= is for a torch process group, or an Elastic"):
        SimulatedWorld(2).run(lambda comm: as_communicator(comm, connections=2))


def test_one_that_is_made_anew_has_as_many(make):
    first = list(make(3, 3))
    on_all(first, lambda comm: comm.close())
    comms = make.anew()
    assert comms[0] is not first[0]
    assert [(comm.transport.connections, comm.timeout) for comm in comms] == [(3, 20), (3, 20)]
    assert on_all(comms, lambda comm: allreduce(torch.ones(2), comm).tolist()) == [[2.0, 2.0]] * 2


@pytest.mark.slow
def test_elastic_ranks_with_unlike_numbers():
    """One of them is told at once, and the other goes on."""
    store, ended = dist.HashStore(), Barrier(2)

    def enter(connections):
        world = Elastic(store, start_with=2, timeout=10, connections=connections)
        try:
            return world.size, world.members
        except ValueError as error:
            return error
        finally:
            ended.wait(60)
            world.close()

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(enter, (2, 3)))
    [error] = [one for one in found if isinstance(one, ValueError)]
    assert "connections=2" in str(error)
    assert "connections=3" in str(error)
    assert [size for size, _ in (one for one in found if one is not error)] == [1]
    assert time.monotonic() - begin < 30


def test_one_that_dies_is_missed_whatever_the_number(make):
    comms = make(3, 3)
    on_all(comms, barrier)
    comms[1].transport._data.end(1.0)
    begin = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 1"):
        allreduce(torch.zeros(PIECE_BYTES), comms[0])
    assert time.monotonic() - begin < 10
