"""Elastic groups under drawn schedules: see `communicators.elastic.testing` for the laws."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from communicators import CollectiveError, Dies, Elastic, LeftOutError, Link, LinkLost, SimulatedWorld, allreduce
from communicators.elastic import board, store
from communicators.elastic.membership import WINDOW_SECONDS
from communicators.elastic.store import StoreBoard, board_of
from communicators.elastic.testing import check_elastic_laws

pytestmark = pytest.mark.quick

SCHEDULES = 200


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(4))
def test_laws(part):
    for seed in range(part, SCHEDULES, 4):
        check_elastic_laws(seed)


@pytest.mark.parametrize("seed", [603, 2297])  # a rank dies while others wait for its word; a newcomer reads no state
def test_laws_where_once_one_was_broken(seed):
    check_elastic_laws(seed)


@pytest.mark.slow
def test_laws_among_many():
    check_elastic_laws(1, size=64)


def test_it_is_not_a_group_of_one_that_founds_a_second_one():
    """All ranks meet in one generation, however late."""
    world = SimulatedWorld(4)

    def body(comm):
        comm.elapse(comm.rank)
        elastic = Elastic(comm, at_least=4)
        return elastic.size, elastic.generation

    assert world.run(body) == [(4, 1)] * 4


@pytest.mark.parametrize("at_least", [0, -1, True, "2", 1.5])
def test_at_least_is_a_number_of_ranks(at_least):
    with pytest.raises(ValueError, match="expected the fewest ranks that train, 1 or more"):
        Elastic("head:29400", at_least=at_least)


@pytest.mark.parametrize("meeting", ["head", "head:", ":29400", "head:port", 29400])
def test_a_meeting_is_an_address_or_a_store(meeting):
    with pytest.raises(ValueError, match=r"expected 'host:port' of `python -m communicators.elastic`, or a Store"):
        Elastic(meeting)


def test_outside_torchrun_a_meeting_is_given(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match=r"run `python -m communicators.elastic` on one machine"):
        Elastic()


def test_a_process_group_is_no_meeting():
    group = dist.ProcessGroup(0, 1)
    with pytest.raises(TypeError, match="whose ranks cannot change: give 'host:port', or a Store"):
        Elastic(group)


def test_patience_says_who_has_come():
    def body(comm):
        come = [r"2 have come \['.\.1', '.\.1'\], at_least=3", r"1 have come \['1.1'\], at_least=3"][comm.rank]
        with pytest.raises(TimeoutError, match=rf"not within . s: .* waits for others: {come}"):
            Elastic(comm, at_least=3, patience=1.0 + comm.rank).rank  # noqa: B018
        return True

    assert SimulatedWorld(2).run(body) == [True, True]


def test_who_has_left_is_not_told_to_be_here():
    def body(comm):
        world = Elastic(comm, at_least=2, patience=1.0)
        world.leaving = world.rank == 1
        world.atomic(lambda: allreduce(torch.ones(1), world))
        try:
            world.boundary(dict)
        except TimeoutError as error:
            return str(error)
        return ""

    said, nothing = sorted(SimulatedWorld(2).run(body), reverse=True)
    assert said.endswith("waits for more ranks: 1 are here, at_least=2")
    assert nothing == ""


def test_after_close_it_says_so():
    def body(comm):
        elastic = Elastic(comm)
        assert elastic.size == 1
        elastic.close()
        with pytest.raises(RuntimeError, match="closed"):
            allreduce(torch.ones(2), elastic)
        return True

    assert SimulatedWorld(1).run(body) == [True]


def test_no_boundary_inside_an_exchange():
    def body(comm):
        elastic = Elastic(comm)
        with pytest.raises(RuntimeError, match=r"boundary\(\) inside atomic\(\)"):
            elastic.atomic(lambda: elastic.boundary(dict))
        return True

    assert SimulatedWorld(1).run(body) == [True]


def test_a_record_is_read_as_it_was_written():
    record = board.Record(3, ("a", "b"), ("b",), 7, (1, 2), (1, 1))
    assert board.Record.of(record.text()) == record
    assert board.Record.of("") == board.Record()


@pytest.mark.parametrize("pair", [(0, 1), (2, 1), (3, 0)])
def test_of_two_ranks_that_lose_each_other_one_is_left_out(pair):
    """All others go on with one of the two, though everybody reaches the board."""
    world = SimulatedWorld(5, faults=[LinkLost(*pair, at=0.5, seconds=1000.0)])

    def body(comm):
        elastic, sizes = Elastic(comm, at_least=5, timeout=0.2), []
        try:
            for _ in range(10):
                comm.elapse(0.1)
                sizes.append(elastic.atomic(lambda: int(allreduce(torch.ones(1), elastic))))
                elastic.boundary(dict)
                elastic._at_least = 1
        except CollectiveError as error:
            return str(error), sizes[:5]
        return sizes

    told = world.run(body)
    [out] = [rank for rank, said in enumerate(told) if isinstance(said, tuple)]
    assert out in pair
    assert f"{out}.1 was left out of generation" in told[out][0]
    assert all(said[:3] == [5, 5, 5] and said[-1] == 4 for rank, said in enumerate(told) if rank != out)


@pytest.mark.parametrize(("gone", "out"), [({1: "3", 3: "1"}, 3), ({2: "0", 0: "23", 3: "0"}, 0)])
def test_ranks_that_have_gone_on_without_each_other_part(gone, out):
    """Who lacks most others is left out, of several the last; the others exchange without it."""

    def body(comm):
        comm.elapse(0.01 * comm.rank)  # they come in this order
        elastic = Elastic(comm, start_with=4, timeout=0.2)

        def exchange():
            elastic.part({f"{rank}.1" for rank in gone.get(comm.rank, "")})
            return allreduce(torch.ones(1), elastic).item()

        try:
            return elastic.atomic(exchange)
        except LeftOutError as error:
            return str(error)

    told = SimulatedWorld(4).run(body)
    assert f"{out}.1 was left out: it and others had lost each other" in told.pop(out)
    assert told == [3.0] * 3


def test_messages_over_a_lost_link_come_once_it_is_back():
    world = SimulatedWorld(3, Link(0.01, 0.0), faults=[LinkLost(0, 1, at=0.0, seconds=2.0)])
    assert [total.item() for total in world.run(lambda comm: allreduce(torch.ones(1), comm))] == [3.0] * 3
    assert 2.0 < world.elapsed < 2.1


def test_a_newcomer_says_what_it_took_over_and_how_long_that_took(caplog):
    def body(comm):
        comm.elapse(0.5 * comm.rank)
        elastic = Elastic(comm, at_least=1, patience=10.0)
        held = elastic.take()["held"] if elastic.joining else torch.ones(1000)
        for _ in range(20):
            comm.elapse(0.1)
            total = elastic.atomic(lambda: allreduce(held, elastic))
            if elastic.size == 2:
                return float(total.sum())
            elastic.boundary(lambda: {"held": held})
        return None

    assert SimulatedWorld(2, Link(0.001, 1e-6)).run(body) == [2000.0, 2000.0]
    [said] = re.findall(r"1\.1 took over (\d+) bytes of state from rank 0 in ([\d.]+) s", caplog.text)
    assert 4000 < int(said[0]) < 8000
    assert 0.004 < float(said[1]) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"at_least": 2}, {"timeout": 7.0}])
@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_rank_with_other_settings_is_told_so_and_the_others_go_on(own, late):
    def body(comm):
        comm.elapse(late * comm.rank + 1e-6 * comm.rank)
        settings = {"at_least": 1, "timeout": 5.0, "start_with": 1 if late else 2}
        if comm.rank == 1:
            with pytest.raises(ValueError, match=r"this rank's Elastic has at_least=.*, that of 0\.1, who began, at_"):
                Elastic(comm, **{**settings, **own}).rank  # noqa: B018
            return None
        elastic = Elastic(comm, **settings)
        for _ in range(20):
            comm.elapse(0.1)
            total = elastic.atomic(lambda: allreduce(torch.ones(1), elastic))
            elastic.boundary(dict)
        return total.item(), comm.clock()

    told = SimulatedWorld(2).run(body)[0]
    assert told[0] == 1.0
    assert told[1] < 5.0


class Held:
    """Something with a state."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("carried", [0, 1, 2, 3])
@pytest.mark.parametrize("asks_before", [False, True])
def test_what_newcomers_carry_is_as_many_as_those_who_train_carry(carried, asks_before):
    """Each gets its state, whether it is carried before anything else or not; else the newcomer is told."""

    def body(comm):
        comm.elapse(0.5 * comm.rank)
        elastic = Elastic(comm)
        held = [Held(10 * comm.rank + one) for one in range(2 if comm.rank == 0 else carried)]
        if asks_before:
            assert elastic.joining == (comm.rank == 1)
        try:
            for one in held:
                elastic.carry(one)
            for _ in elastic.deal(list(range(40)), batch_size=1):
                comm.elapse(0.1)
                elastic.atomic(lambda: allreduce(torch.ones(1), elastic))
                elastic.boundary(dict)
        except ValueError as error:
            elastic.close()
            return str(error)
        return [one.number for one in held]

    trains, came = SimulatedWorld(2).run(body)
    assert trains == [0, 1]
    assert came == trains if carried == 2 else f"{carried} objects are carried, but 2 by those who train" in came


def test_who_is_taken_for_a_newcomer_though_it_was_in_the_group_is_left_out():
    """A rank that came too late to the first generation may still stand in the line when the next but one begins."""

    def body(comm):
        elastic = Elastic(comm)
        assert elastic.size == 1
        (name,) = elastic.members
        old = elastic._board.record()
        others = board.Record(3, ("other", name), (name,), drawn=(0,), committed=(0,), run=old.run, alike=old.alike)
        elastic._board.swap(board.RECORD, old.text(), others.text())
        with pytest.raises(LeftOutError, match=name):
            elastic._regroup(elastic.clock())
        return True

    assert SimulatedWorld(1).run(body) == [True]


def test_bytes_are_counted_once_over_all_generations():
    def body(comm):
        elastic = Elastic(comm, start_with=3)
        for _ in range(10):
            elastic.elapse(0.1)
            elastic.atomic(lambda: allreduce(torch.ones(100), elastic))
            elastic.boundary(dict)
        return elastic.generation, elastic.bytes_sent, elastic.messages_sent

    world = SimulatedWorld(3, faults=[Dies(2, at=0.55)])
    told = world.run(body)[:2]
    assert told == [(2, world.bytes_sent[rank], world.messages_sent[rank]) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_newcomer_whose_state_is_under_way_when_another_rank_dies_comes_again_soon(dead):
    """It is not to blame, and does not wait for as long as the time-out."""

    def body(comm):
        comm.elapse(0.1 * (comm.rank == 3))
        elastic = Elastic(comm, start_with=3, timeout=60.0, patience=100.0)
        held = elastic.take()["held"] if elastic.joining else torch.ones(100_000)
        sizes = []
        for _ in range(60):
            comm.elapse(0.1)
            elastic.atomic(lambda: allreduce(torch.ones(3), elastic))
            elastic.boundary(lambda: {"held": held})
            sizes.append(elastic.size)
        return sizes

    told = SimulatedWorld(4, Link(1e-5, 1e-5), faults=[Dies(dead, at=1.5)]).run(body)
    assert all(sizes[-1] == 3 for rank, sizes in enumerate(told) if rank not in (dead, 3))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.22, 0.23, 0.24, 0.25, 0.3, 0.5])
def test_samples_are_dealt_once_where_a_generation_does_not_come_together(seconds):
    """A rank dies, and two of those who are left find no connection to each other at once.

    One of them is left out, unless the connection comes back; the batch that it had in hand is dealt again.
    """
    taken = []

    def body(comm):
        elastic = Elastic(comm, start_with=4, timeout=0.2)
        for batch in elastic.deal(range(400), batch_size=8, collate_fn=list):
            comm.elapse(0.05)
            with suppress(LeftOutError):
                elastic.atomic(lambda: allreduce(torch.ones(3), elastic))
                taken.extend(batch)
                elastic.boundary(dict)
                continue
            return
        elastic.close()

    SimulatedWorld(4, faults=[Dies(3, at=0.52), LinkLost(0, 1, at=0.52, seconds=seconds)]).run(body)
    assert sorted(taken) == list(range(400))


def test_an_exchange_that_takes_longer_than_the_time_out_ends_with_an_error():
    def body(comm):
        world = Elastic(comm, start_with=3, timeout=0.05)
        with pytest.raises(CollectiveError, match=r"5 attempts .* all 3 ranks are there, .* timeout=0\.05 s") as error:
            world.atomic(lambda: allreduce(torch.ones(3), world))
        return f"at last because {error.value.__cause__}; where" in str(error.value)

    assert SimulatedWorld(3, Link(0.2, 0.0)).run(body) == [True] * 3


def test_ranks_that_do_not_connect_further_go_on_in_another_generation():
    """As where rounds connect for their signals: not the group of all has failed, only a duplicate of it."""

    def body(comm):
        world, attempts = Elastic(comm, start_with=3, timeout=1.0), list[int]()

        def exchange():
            attempts.append(world.generation)
            if world.generation == 1:
                raise CollectiveError("timed out after 1 s: rank 0 waits for ranks [1] in the first call")
            return float(allreduce(torch.ones(1), world))

        return world.atomic(exchange), attempts

    assert SimulatedWorld(3).run(body) == [(3.0, [1, 2])] * 3


def test_a_rank_that_comes_late_to_where_another_has_died_is_waited_for_as_long_as_the_time_out_says():
    took = []

    def body(comm):
        world = Elastic(comm, start_with=3, timeout=5.0)
        world.atomic(lambda: allreduce(torch.ones(1), world))
        if comm.rank == 1:
            comm.elapse(100.0)
            return
        began = world.clock()
        world.atomic(lambda: allreduce(torch.ones(1), world))
        took.append(world.clock() - began)

    SimulatedWorld(3, faults=[Dies(2, at=0.1)]).run(body)
    assert took == [pytest.approx(5.0 + WINDOW_SECONDS, abs=0.01)]


def test_a_newcomer_that_dies_while_it_connects_costs_one_time_out():
    took = []

    def body(comm):
        comm.elapse(0.5 if comm.rank == 2 else 0.0)
        world = Elastic(comm, start_with=2, timeout=5.0)
        for _ in range(100):
            comm.elapse(0.01)
            began = world.clock()
            world.atomic(lambda: allreduce(torch.ones(1), world))
            world.boundary(dict)
            took.append(world.clock() - began)

    SimulatedWorld(3, faults=[LinkLost(2, 0, at=0.4, seconds=60.0), Dies(2, at=1.5)]).run(body)
    assert 5.0 <= max(took) < 6.0


def test_a_newcomer_comes_again_at_once_where_another_rank_has_died_while_all_connect():
    took = []

    def body(comm):
        comm.elapse(0.5 if comm.rank == 2 else 0.0)
        world = Elastic(comm, start_with=2, timeout=5.0)
        for _ in range(1000):
            comm.elapse(0.01)
            if comm.rank == 2:
                assert world.joining
                took.append(comm.clock())
                return
            world.atomic(lambda: allreduce(torch.ones(1), world))
            world.boundary(dict)

    SimulatedWorld(3, faults=[LinkLost(2, 1, at=0.4, seconds=60.0), Dies(1, at=1.5)]).run(body)
    assert took == [pytest.approx(0.5 + 5.0, abs=0.5)]


def test_a_newcomer_is_not_to_blame_for_two_others_that_do_not_reach_each_other():
    """It comes again at once, while each of those waits for half of the time-out at least."""

    def body(comm):
        comm.elapse(0.5 if comm.rank else 0.0)
        world = Elastic(comm, timeout=5.0, start_with=1, patience=30.0)
        came = comm.clock() if world.joining else None
        while comm.clock() < 15.0 and came is None:
            comm.elapse(0.1)
            world.atomic(lambda: allreduce(torch.ones(1), world))
            world.boundary(dict)
        world.close()
        return came

    _, came, *_ = SimulatedWorld(4, faults=[LinkLost(2, 3, at=0.0, seconds=60.0)]).run(body)
    assert 5.5 < came < 6.5


def test_a_record_gives_way_only_to_who_knows_the_newest():
    """Of ranks that replace one record at once, one does, and all are told who."""

    def body(comm):
        own = board_of(comm, "training")
        comm.elapse(0.01 * comm.rank)
        told = own.swap(board.RECORD, "", f"by {comm.rank}")
        comm.elapse(1.0)
        return told, own.get(board.RECORD), own.swap(board.RECORD, "by nobody", "late")

    assert SimulatedWorld(5).run(body) == [("by 0", "by 0", "by 0")] * 5


def test_boards_find_out_whom_they_do_not_reach(monkeypatch):
    monkeypatch.setattr(store, "PROBE_SECONDS", 4.0)
    kept, names = dist.HashStore(), "abcdefghijklm"

    def unreached(name):
        own = StoreBoard(lambda: kept, "here")
        own.name = name
        return own.unreached(2, [other for other in names if other != name])

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(unreached, names[:12])) == [("m",)] * 12


def test_a_store_that_is_not_there_yet_is_waited_for():
    store, refused = dist.HashStore(), [RuntimeError("refused")] * 2

    def opened():
        if refused:
            raise refused.pop()
        return store

    assert StoreBoard(opened, "here").swap("key", "", "first") == "first"
    board = StoreBoard(opened, "here")
    board.patience, refused[:] = 0.0, [RuntimeError("refused")] * 9
    with pytest.raises(TimeoutError, match="refused"):
        board.swap("key", "", "first")
