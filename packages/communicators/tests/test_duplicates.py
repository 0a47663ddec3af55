"""Duplicates of a communicator: their calls come in any order to each other, and their errors are their own."""

from __future__ import annotations

import gc

import pytest
import torch
from communicators import CollectiveError, Link, SimulatedWorld, allreduce, allreduce_async, testing
from communicators.background.engine import depart, engine
from communicators.communicator import MOST_DUPLICATES
from communicators.worlds.alone import Alone
from hypothesis import given
from hypothesis import strategies as st
from ranks_on_threads import on_all, ranks, soon

pytestmark = pytest.mark.quick


@given(size=testing.world_sizes(), data=st.data())
def test_calls_on_each_come_in_any_order(size, data):
    orders = [data.draw(st.permutations(range(3))) for _ in range(size)]

    def body(comm):
        comms = [comm, comm.duplicate()]
        comms.append(comms[1].duplicate())
        works = {i: allreduce_async(torch.full((4,), 10.0**i), comms[i]) for i in orders[comm.rank]}
        return [works[i].wait()[0].item() for i in range(3)]

    assert SimulatedWorld(size).run(body) == [[size * 1.0, size * 10.0, size * 100.0]] * size


@given(size=st.sampled_from([2, 3, 5]), data=st.data())
def test_an_error_of_one_leaves_the_others_alone(size, data):
    odd = data.draw(st.integers(0, size - 1))

    def body(comm):
        other = comm.duplicate()
        with pytest.raises(CollectiveError, match="ranks disagree"):
            allreduce(torch.ones(3 + (comm.rank == odd)), other)
        with pytest.raises(CollectiveError, match="ranks disagree"):
            allreduce(torch.ones(3), other)
        return allreduce(torch.ones(1), comm).item(), allreduce(torch.ones(1), comm.duplicate()).item()

    assert SimulatedWorld(size).run(body) == [(size, size)] * size


@pytest.mark.parametrize("of", [lambda comm: comm, lambda comm: comm.split(0)], ids=["world", "group"])
def test_they_are_bounded_in_number_and_freed_by_closing(of):
    def body(comm):
        comm = of(comm)
        made = [comm.duplicate() for _ in range(MOST_DUPLICATES)]
        with pytest.raises(RuntimeError, match="close\\(\\) some"):
            comm.duplicate()
        made[3].close()
        with pytest.raises(CollectiveError, match="closed"):
            allreduce(torch.ones(1), made[3])
        return allreduce(torch.ones(1), comm.duplicate()).item()

    assert SimulatedWorld(2).run(body) == [2.0, 2.0]


def test_a_duplicate_that_is_dropped_without_closing_departs_at_the_end_all_the_same():
    """Its peers wait for that word at their own end, under MPI without a limit."""
    comms = ranks(2)
    kept = on_all(comms, lambda comm: comm.duplicate())[1]  # rank 0's is not kept by its user
    gc.collect()
    of_rank_0 = [one for one in engine()._listened_to() if one.rank == 0 and one.transport.network in networks(comms)]
    depart(of_rank_0, "it exited", timeout=0.0)
    try:
        assert soon(lambda: comms[1].control.awaited() == kept.control.awaited() == [])
    finally:
        engine().forget(kept.control)  # else this process would wait as well


def networks(comms):
    """Those of communicators and of all their duplicates."""
    found = [comm.transport.network for comm in comms]
    return found + [duplicate for network in found for duplicate in network.duplicates.values()]


def test_alone():
    assert allreduce(torch.ones(2), Alone().duplicate()).tolist() == [1.0, 1.0]


def test_a_works_times_are_virtual():
    def body(comm):
        comm.elapse(1.0)
        work = allreduce_async(torch.ones(4), comm)
        assert work.ended is None
        comm.elapse(5.0)
        work.wait()
        return work.began, work.ended

    assert SimulatedWorld(2, Link(0.25, 0.0)).run(body) == [(1.0, 1.25)] * 2
