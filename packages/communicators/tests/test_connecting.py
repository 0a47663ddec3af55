"""The connections of a process group's communicator."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch.distributed as dist
from communicators.worlds import gloo, gloo_group
from communicators.worlds.gloo import GlooTransport
from communicators.worlds.gloo_group import GlooGroup
from communicators.worlds.meeting import Rendezvous

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("late", range(3))
def test_no_rank_goes_on_before_all_are_connected(monkeypatch, late):
    """It may close straight afterwards, which cuts off whoever connects still."""
    others_connected, may_end = threading.Barrier(4), threading.Event()

    def connected(store, rank, size, connections):
        made = GlooGroup(store, rank, size, connections)
        others_connected.wait(60)
        if rank == late:
            may_end.wait(60)
        return made

    monkeypatch.setattr(gloo, "GlooGroup", connected)
    store = dist.HashStore()

    def opened_and_closed(rank):
        transport = GlooTransport(Rendezvous(rank, 3, store, store), 60.0)
        transport.close()

    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(opened_and_closed, rank) for rank in range(3)]
        others_connected.wait(60)
        early = wait(ranks, timeout=0.3).done
        may_end.set()
        for rank in ranks:
            rank.result(60)
    assert not early


def told(ranks=2, patience=2.0):
    """Errors of ranks that meet in one Store, and connect."""
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        made = [pool.submit(GlooTransport, Rendezvous(rank, ranks, store, store), patience) for rank in range(ranks)]
        return [one.exception(30) for one in made]


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    for error in told():
        assert str(error).startswith("GLOO_SOCKET_IFNAME is 'nosuch0', which is no interface with an address")
        assert " lo" in str(error)
        assert "enforce fail" not in str(error)


@pytest.mark.slow
def test_ranks_that_have_met_and_cannot_connect(monkeypatch):
    """As where the interface of one is its own loopback, or a firewall drops what comes: gloo fails, or waits."""
    never = threading.Event()

    def refused(store, rank, size, timeout):
        if rank == 0:
            raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting")
        never.wait(30)
        raise RuntimeError

    monkeypatch.setattr(gloo_group, "ProcessGroupGloo", refused)
    begin = time.monotonic()
    first, second = map(str, told())
    never.set()
    assert time.monotonic() - begin < 10
    assert first.startswith("rank 0 cannot connect to all others, which are there: open all ports")
    assert second.startswith("timed out after 1.")
    assert "rank 1 cannot connect to all others, which are there" in second
    assert "GLOO_SOCKET_IFNAME" in second
    assert "Store" not in second


def test_a_nap_ends_where_a_message_comes(monkeypatch):
    """Else who waits would notice it late, or keep a core busy with looking."""
    monkeypatch.setattr(gloo, "LONGEST_NAP_SECONDS", 60.0)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda rank: GlooTransport(Rendezvous(rank, 2, store, store), 60.0), range(2))
        one.nap(0.0)  # connecting was news
        nap = pool.submit(one.nap, 60.0)
        assert not wait([nap], timeout=0.2).done
        other.send_control(0, b"now")
        nap.result(20)
        assert one.read_control() == [b"now"]
        for ended in [pool.submit(transport.close) for transport in (one, other)]:
            ended.result(30)
