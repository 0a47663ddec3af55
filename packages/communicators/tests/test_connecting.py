"""The connections of a process group's communicator."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch.distributed as dist
from communicators.worlds import gloo
from communicators.worlds.gloo import GlooGroup, GlooTransport
from communicators.worlds.meeting import Rendezvous


@pytest.mark.parametrize("late", range(3))
def test_no_rank_goes_on_before_all_are_connected(monkeypatch, late):
    """It may close straight afterwards, which cuts off whoever connects still."""
    others_connected, may_end = threading.Barrier(4), threading.Event()

    def connected(store, rank, size):
        made = GlooGroup(store, rank, size)
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
