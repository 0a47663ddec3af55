"""The simulated world: time, order, faults, and what it says when ranks wait for each other."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from communicators import (
    SLOT_BYTES,
    CollectiveError,
    Corrupts,
    Dies,
    Elapse,
    Link,
    LinkLost,
    Payload,
    Round,
    SimulatedWorld,
    allreduce,
    run,
    start,
    testing,
)
from communicators.simulated.ranks import RankThread
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick

ROOM = 16


def exchange(peer, x, seconds=0.0):
    yield Elapse(seconds)
    received = yield Round({peer: Payload.of(x)}, {peer: x.nbytes})
    return received[peer].view(x.dtype)


def reasons(world, fn):
    """What each rank's collective error says (None where it raised none)."""

    def caught(comm):
        try:
            fn(comm)
        except CollectiveError as error:
            return str(error)
        return None

    return world.run(caught)


def test_one_message_costs_alpha_plus_beta_bytes():
    world = SimulatedWorld(2, Link(alpha=1.0, beta=0.5))
    world.run(lambda comm: run(exchange(1 - comm.rank, torch.ones(1)), comm))
    assert world.elapsed == 1.0 + 0.5 * 20
    assert world.bytes_sent == [20, 20]
    assert world.messages_sent == [1, 1]


def test_a_rank_sends_one_message_at_a_time():
    def fan_out(comm):
        if comm.rank == 0:
            run((_ for _ in [Round(sends={peer: Payload.of(torch.ones(4)) for peer in (1, 2, 3)})]), comm, facts="fan")
        else:
            run((_ for _ in [Round(recvs={0: ROOM})]), comm, facts="fan")
        return comm.clock()

    times = SimulatedWorld(4, Link(alpha=1.0, beta=0.0)).run(fan_out)
    assert sorted(times) == [1.0, 2.0, 3.0, 3.0]


def test_a_rank_receives_one_message_at_a_time():
    def fan_in(comm):
        if comm.rank == 0:
            run((_ for _ in [Round(recvs=dict.fromkeys((1, 2, 3), ROOM))]), comm, facts="fan")
        else:
            run((_ for _ in [Round(sends={0: Payload.of(torch.ones(4))})]), comm, facts="fan")
        return comm.clock()

    assert sorted(SimulatedWorld(4, Link(alpha=1.0, beta=0.0)).run(fan_in)) == [1.0, 2.0, 3.0, 3.0]


def test_slowdown_stretches_computation_not_messages():
    def step(comm):
        comm.elapse(1.0)
        run(exchange(1 - comm.rank, torch.ones(1), seconds=1.0), comm)
        return comm.clock()

    assert SimulatedWorld(2, Link(0.5, 0.0), slowdown=[1, 3]).run(step) == [6.5, 6.5]


def test_start_hides_the_exchange_behind_computation():
    def overlapped(comm):
        work = start(exchange(1 - comm.rank, torch.ones(1)), comm)
        comm.elapse(3.0)
        work.wait()
        return comm.clock()

    assert SimulatedWorld(2, Link(2.0, 0.0)).run(overlapped) == [3.0, 3.0]


def test_works_complete_in_any_order_and_futures_chain():
    def several(comm):
        works = [start(exchange(1 - comm.rank, torch.full((1,), float(i))), comm) for i in range(4)]
        assert not works[3].is_completed()
        doubled = works[2].get_future().then(lambda future: future.wait() * 2)
        results = [work.wait().item() for work in reversed(works)]
        assert all(work.is_completed() for work in works)
        return [*results, doubled.wait().item()]

    assert SimulatedWorld(2).run(several) == [[3.0, 2.0, 1.0, 0.0, 4.0]] * 2


def test_wait_times_out_and_the_call_goes_on():
    def impatient(comm):
        work = start(exchange(1 - comm.rank, torch.ones(1)), comm)
        with pytest.raises(TimeoutError, match=r"rank \d waits for rank \d in call 0"):
            work.wait(timeout=1.0)
        return comm.clock(), work.wait().item(), comm.clock()

    assert SimulatedWorld(2, Link(2.0, 0.0)).run(impatient) == [(1.0, 1.0, 2.0)] * 2


def test_a_late_rank_fails_the_call_on_all():
    def late(comm):
        comm.elapse(10.0 * comm.rank)
        run(exchange(comm.rank ^ 1, torch.ones(1)), comm, facts="swap", timeout=5.0)

    got = reasons(SimulatedWorld(4), late)
    assert len(set(got)) == 1
    assert "timed out after 5.0 virtual seconds" in got[0]


def test_deadlock_names_who_waits_for_whom():
    def ring(comm):
        run((_ for _ in [Round(recvs={(comm.rank + 1) % 3: ROOM})]), comm, facts="ring")

    got = reasons(SimulatedWorld(3), ring)
    assert len(set(got)) == 1
    assert got[0] == (
        "deadlock: rank 0 waits for rank 1 in call 0, round 0 of ring; rank 1 waits for rank 2 in call 0, round 0 of "
        "ring; rank 2 waits for rank 0 in call 0, round 0 of ring"
    )


def test_a_rank_that_returned_is_named():
    got = reasons(SimulatedWorld(3), lambda comm: comm.rank == 1 or allreduce(torch.ones(1), comm))
    assert got[0] == got[2]
    assert got[1] is None
    assert "already returned: rank 1" in got[0]


@given(size=testing.world_sizes(), data=st.data())
def test_a_dying_rank_ends_the_collective_on_all(size, data):
    dying = data.draw(st.integers(0, size - 1))
    world = SimulatedWorld(size, faults=[Dies(dying, message=data.draw(st.integers(0, 2)))])
    got = reasons(world, lambda comm: [allreduce(torch.ones(5), comm) for _ in range(4)])
    if size > 1:
        alive = got[:dying] + got[dying + 1 :]
        assert set(alive) == {f"rank {dying} died in allreduce(shape=(5,), torch.float32)"}


@given(size=testing.world_sizes(), numel=st.sampled_from([0, 5, 5000]), bit=st.integers(0, 1 << 20), data=st.data())
def test_one_flipped_bit_anywhere_in_a_message_ends_the_collective_on_all(size, numel, bit, data):
    source, message = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 1))
    world = SimulatedWorld(size, faults=[Corrupts(source, message, bit)])
    # A short sum is one message of a rank, so that both may lie in two calls; who was through hears of it in the third.
    got = reasons(world, lambda comm: [allreduce(torch.randn(numel), comm) for _ in range(3)])
    if size > 1:
        assert len(set(got)) == 1
        assert f"from rank {source}" in got[0]
        assert got[0].startswith(("corrupted header", "corrupted message"))


@given(size=testing.world_sizes(), data=st.data())
def test_other_facts_on_one_rank_end_the_call_on_all(size, data):
    odd = data.draw(st.integers(0, size - 1))
    got = reasons(SimulatedWorld(size), lambda comm: allreduce(torch.ones(5 + (comm.rank == odd)), comm))
    if size > 1:
        assert len(set(got)) == 1
        assert "shape=(5,)" in got[0]
        assert f"rank {odd} calls allreduce(shape=(6,)" in got[0]


def test_an_error_inside_a_schedule_ends_the_call_on_all():
    def broken(comm):
        def schedule():
            yield Round()
            if comm.rank == 1:
                raise ZeroDivisionError("by hand")
            yield Round(recvs={1: ROOM})

        run(schedule(), comm, facts="broken")

    assert set(reasons(SimulatedWorld(3), broken)) == {"rank 1 failed in broken: ZeroDivisionError: by hand"}


def test_an_error_in_a_ranks_own_code_is_raised_and_frees_the_others():
    outcomes = {}

    def one_raises(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        try:
            allreduce(torch.ones(1), comm)
        except CollectiveError as error:
            outcomes[comm.rank] = str(error)
            raise

    with pytest.raises(KeyError, match="mine"):
        SimulatedWorld(3).run(one_raises)
    assert set(outcomes.values()) == {"rank 1 failed in its own code: KeyError: 'mine'"}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_rank_that_dies_amid_its_sends_gives_all_ranks_one_reason(size):
    def everybody(rank):
        peers = [peer for peer in range(size) if peer != rank]
        for _ in range(2):
            yield Round({peer: Payload.of(torch.ones(4)) for peer in peers}, dict.fromkeys(peers, ROOM))

    for message in range(2 * (size - 1)):
        world = SimulatedWorld(size, faults=[Dies(1, message=message)])
        said = {}

        def body(comm, said=said):
            try:
                run(everybody(comm.rank), comm)
            except CollectiveError as error:
                said[comm.rank] = str(error)
                raise

        with pytest.raises(CollectiveError, match=r"^rank 1 died in .*everybody$"):
            world.run(body)
        assert len(said) == size - 1
        assert len(set(said.values())) == 1


def test_after_a_failure_later_calls_raise_the_same():
    def twice(comm):
        got = []
        for _ in range(2):
            try:
                allreduce(torch.ones(1 + comm.rank), comm)
            except CollectiveError as error:
                got.append(str(error))
        return got

    got = SimulatedWorld(2).run(twice)
    assert len({reason for rank in got for reason in rank}) == 1
    assert [len(rank) for rank in got] == [2, 2]


def test_a_message_longer_than_its_receiver_expects():
    def long(comm):
        yield Round({1 - comm.rank: Payload.of(torch.ones(4))}, {1 - comm.rank: ROOM - 4 * comm.rank})

    got = reasons(SimulatedWorld(2), lambda comm: run(long(comm), comm, facts="long"))
    assert got[0] == got[1]
    assert got[0].startswith("message too long: rank 0 sent 16 bytes, rank 1 has room for 12")


def test_a_message_shorter_than_its_receiver_expects_is_one_where_sizes_are_bounds():
    def short(comm, bounded):
        received = yield Round({1 - comm.rank: Payload.of(torch.ones(3))}, {1 - comm.rank: ROOM}, bounded=bounded)
        return received[1 - comm.rank].view(torch.float32).tolist()

    got = reasons(SimulatedWorld(2), lambda comm: run(short(comm, False), comm, facts="short"))
    assert got[0] == got[1]
    assert got[0].startswith("message too short: rank 0 sent 12 bytes, rank 1 expects 16 in round 0 of short")
    assert SimulatedWorld(2).run(lambda comm: run(short(comm, True), comm)) == [[1.0] * 3] * 2


def test_a_payload_changed_after_it_was_yielded_shows():
    """Messages travel without a copy, as with MPI: writing too early is an error of the schedule that must show."""

    def hasty(comm):
        payload = Payload.of(torch.ones(1))

        def schedule():
            received = yield Round({1 - comm.rank: payload}, {1 - comm.rank: payload.nbytes})
            return received[1 - comm.rank].view(torch.float32).item()

        work = start(schedule(), comm, facts="hasty")
        comm.elapse(0.5)
        payload.view(torch.float32).fill_(7.0)
        return work.wait()

    with pytest.raises(CollectiveError, match="a schedule that has changed a payload after it yielded it"):
        SimulatedWorld(2, Link(1.0, 0.0)).run(hasty)


def test_what_nobody_receives_is_an_error():
    def send_only(comm):
        if comm.rank == 0:
            yield Round(sends={1: Payload.of(torch.ones(1))})
        else:
            yield Round()

    with pytest.raises(CollectiveError, match="rank 0 sent a message to rank 1 in call 0, lost, which was never"):
        SimulatedWorld(2).run(lambda comm: run(send_only(comm), comm, facts="lost"))


def test_what_never_completes_is_an_error():
    with pytest.raises(CollectiveError, match="started, but never completed: rank 0 waits for rank 1"):
        SimulatedWorld(2).run(lambda comm: comm.rank or start(exchange(1, torch.ones(1)), comm))


@pytest.mark.parametrize(
    "memory",
    [torch.ones(3), torch.zeros(2).byte(), torch.zeros(1, 20).byte(), torch.zeros(48).byte()[::2]],
)
def test_the_memory_of_payloads_is_checked(memory):
    with pytest.raises(ValueError, match="expected contiguous 1-D uint8 that begins with a free slot of 16 bytes"):
        Payload(memory)


def test_a_payload_is_a_body_behind_a_slot():
    x = torch.arange(6.0).view(2, 3)
    payload = Payload.of(x)
    assert (payload.nbytes, payload.wire_nbytes) == (24, 24 + SLOT_BYTES)
    assert payload.view(torch.float32).tolist() == x.view(-1).tolist()
    copy = payload.clone()
    copy.body.zero_()
    assert payload.view(torch.float32).tolist() == x.view(-1).tolist()
    assert Payload.allocate(5).body.shape == (5,)


def test_work_says_what_this_rank_has_sent():
    def body(comm):
        before = comm.bytes_sent
        works = [start(exchange(comm.rank ^ 1, torch.ones(n)), comm) for n in (1, 100)]
        for work in works:
            work.wait()
        assert comm.bytes_sent - before == sum(work.bytes_sent for work in works)
        return [work.bytes_sent for work in works]

    assert SimulatedWorld(2).run(body) == [[4 + SLOT_BYTES, 400 + SLOT_BYTES]] * 2


@pytest.mark.parametrize("peer", [-1, 2, 0])
def test_peers_are_checked(peer):
    with pytest.raises(CollectiveError, match=f"cannot exchange with rank {peer}"):
        SimulatedWorld(2).run(
            lambda comm: run((_ for _ in [Round(recvs={peer if comm.rank == 0 else 0: ROOM})]), comm, facts="bad")
        )


def test_the_same_seed_gives_the_same_run():
    def clocks(seed):
        world = SimulatedWorld(5, seed=seed, jitter=1.0)
        return world.run(lambda comm: (allreduce(torch.ones(50), comm), comm.clock())[1])

    assert clocks(3) == clocks(3)
    assert clocks(3) != clocks(4)


@given(data=st.data())
def test_hypothesis_can_drive_the_order(data):
    world = SimulatedWorld(4, jitter=1e-3, draw=lambda: data.draw(st.floats(0, 1, exclude_max=True)))
    assert all(
        result.item() == 6.0 for result in world.run(lambda comm: allreduce(torch.tensor(1.0 * comm.rank), comm))
    )


@pytest.mark.slow
def test_a_thousand_ranks():
    results = SimulatedWorld(1024).run(lambda comm: allreduce(torch.full((8,), float(comm.rank)), comm, native=False))
    assert all(torch.equal(result, torch.full((8,), 1024 * 1023 / 2)) for result in results)


@pytest.mark.slow
def test_long_runs_keep_no_results():
    """A call's tensors are released with its result, also in a world that lives long."""
    import gc
    import weakref

    kept = []

    def train(comm):
        for _ in range(5):
            kept.append(weakref.ref(allreduce(torch.ones(1000), comm, native=False)))
        gc.collect()
        return [ref() is None for ref in kept[:2]]

    assert all(all(gone) for gone in SimulatedWorld(2).run(train))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SimulatedWorld(0),
        lambda: SimulatedWorld(2, slowdown=[1.0]),
        lambda: SimulatedWorld(2, slowdown=[1.0, -1.0]),
        lambda: SimulatedWorld(2, slowdown=[1.0, math.nan]),
        lambda: SimulatedWorld(2, jitter=-1e-3),
        lambda: SimulatedWorld(2, jitter=math.nan),
        lambda: SimulatedWorld(2, faults=[Dies(rank=2)]),
        lambda: SimulatedWorld(2, faults=[Corrupts(rank=-1)]),
        lambda: SimulatedWorld(2, faults=[LinkLost(0, 3, at=0.1, seconds=0.1)]),
        lambda: Link(-1.0, 0.0),
        lambda: Link(math.nan, 0.0),
        lambda: Link(0.0, math.inf),
    ],
)
def test_wrong_worlds(wrong):
    with pytest.raises(ValueError, match=r"needs|names"):
        wrong()


def test_no_thread_of_a_rank_is_left_when_a_run_is_over(monkeypatch):
    live = RankThread._live

    def dawdles(self, body):
        live(self, body)
        time.sleep(0.01)

    monkeypatch.setattr(RankThread, "_live", dawdles)
    before = threading.active_count()
    SimulatedWorld(3).run(lambda comm: allreduce(torch.ones(3), comm))
    assert threading.active_count() == before
    with pytest.raises(CollectiveError, match="deadlock"):
        SimulatedWorld(3).run(lambda comm: comm.rank or allreduce(torch.ones(3), comm))
    assert threading.active_count() == before


def test_a_communicator_says_that_the_run_of_its_world_is_over():
    [comm, _] = SimulatedWorld(2).run(lambda comm: comm)
    calls = (lambda: allreduce(torch.ones(2), comm, native=False), lambda: comm.elapse(1.0))
    for call in calls:
        with pytest.raises(CollectiveError, match="run of this simulated world is over"):
            call()
        with ThreadPoolExecutor(1) as pool, pytest.raises(CollectiveError, match="is over"):
            pool.submit(call).result(10)


@pytest.mark.parametrize("jitter", [1e-4, 2e-3])
def test_jitter_lengthens_a_message_by_as_much_at_most(jitter):
    def seconds(jitter, seed):
        world = SimulatedWorld(2, Link(1e-3, 0.0), jitter=jitter, seed=seed)
        world.run(lambda comm: allreduce(torch.ones(1), comm))
        return world.elapsed

    least, took = seconds(0.0, 0), [seconds(jitter, seed) for seed in range(40)]
    most = least * (1 + jitter / 1e-3)
    assert least <= min(took) * (1 + 1e-9)
    assert max(took) <= most * (1 + 1e-9)
    assert max(took) - min(took) >= 0.2 * (most - least)
