"""Seconds in which messages of each peer were lacking, as communicators over a transport count them."""

import time

import pytest
import torch
from communicators import Payload, Round, Stats, run
from ranks_on_threads import on_all, ranks

pytestmark = pytest.mark.quick

LATE = 0.8
"""Seconds; more than a call waits before it looks whom it waits for."""


def gather(rank):
    """Rank 0 receives from all others in one round."""
    if rank == 0:
        yield Round(recvs={1: 1, 2: 1})
    else:
        yield Round(sends={0: Payload.of(torch.ones(1, dtype=torch.uint8))})


def late(comm, seconds=LATE):
    began = time.monotonic()
    run(gather(comm.rank), comm, facts="the first, which agrees on facts")
    before = dict(comm.awaited)
    if comm.rank == 2:
        time.sleep(seconds)
    run(gather(comm.rank), comm, facts="the first, which agrees on facts")
    assert all(waited <= time.monotonic() - began for waited in comm.awaited.values())
    return {peer: waited - before.get(peer, 0.0) for peer, waited in comm.awaited.items()}


def test_it_is_the_late_peers_messages_that_are_lacking():
    first, *others = on_all(ranks(3), late)
    assert first[2] >= LATE - 0.05
    assert first.get(1, 0.0) < LATE / 2
    for other in others:
        assert all(seconds < LATE / 2 for seconds in other.values())


def test_of_a_duplicate_they_count_for_both():
    def call(comm):
        twin = comm.duplicate()
        own = late(twin)
        return own, dict(twin.awaited), dict(comm.awaited)

    own, of_twin, of_comm = on_all(ranks(3), call)[0]
    assert own[2] >= LATE - 0.05
    assert all(of_comm[peer] >= seconds for peer, seconds in of_twin.items())


def test_statistics_of_a_group_have_a_number_for_each_peer():
    def call(comm):
        late(comm, 0.0)
        return Stats.of_group(comm, steps=2), comm.awaited

    for rank, (stats, awaited) in enumerate(on_all(ranks(3), call)):
        assert (stats["steps"], stats["rank"], stats["ranks"], stats["generation"]) == (2, rank, 3, 1)
        told = {name: seconds for name, seconds in stats.items() if "awaited" in name}
        assert told == {f"seconds_awaited_of_{peer}": seconds for peer, seconds in awaited.items()}
        assert rank not in awaited
