"""Ranks that die: an error that all others give, or they go on without; nothing that they give is lost."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
import torch
from communicators import CollectiveError, Communicator, Dies, SimulatedWorld, barrier
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_collectives import EagerSGD, PartialAllreduce
from ranks_on_threads import Threads, on_all, ranks

pytestmark = pytest.mark.quick

SIZE = 4
MARK = 16
"""Ranks count their gradients in digits to this base, so that a sum tells how many of each rank are in it."""


@st.composite
def plans(draw):
    """(settings, seconds of each step of each rank, who dies when)."""
    size = draw(st.integers(1, 5))
    step = st.sampled_from([0.0, 1e-4, 1e-3, 5e-3])
    steps = [[draw(st.lists(step, max_size=5)) for _ in range(2)] for _ in range(size)]
    dying = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
    deaths = [Dies(rank, at=draw(st.floats(5e-3, 0.03))) for rank in dying]
    return (
        {
            "quorum": draw(st.one_of(st.sampled_from(["solo", "majority"]), st.integers(1, size))),
            "max_staleness": draw(st.integers(0, 3)),
            "grace": draw(st.sampled_from([0.0, 1e-3])),
        },
        steps,
        deaths,
    )


def follow(comm, settings, halves, given_):
    """What a rank gets; what it gives is counted in given_, which outlives it."""
    got = []

    def apply(results):
        for result in results:
            got.append((*result.total.tolist(), result.round, result.contributors, result.members, result.deposits))
            result.total.fill_(-1)  # it is the user's, and nobody else's

    with PartialAllreduce(torch.zeros(2, dtype=torch.int64), comm, on_death="shrink", **settings) as partial:
        for number, half in enumerate(halves):
            for seconds in half:
                comm.elapse(seconds)
                given_[comm.rank] += 1
                apply(partial.allreduce(torch.full((2,), MARK**comm.rank)))
            if number == 0:
                apply(partial.synchronize())
        apply(partial.finish())
    return got


@pytest.mark.slow
@settings(max_examples=150)
@given(plans(), st.integers(0, 99))
def test_those_that_are_left_agree_and_lose_nothing(plan, order):
    agree_and_lose_nothing(*plan, order, jitter=2e-4)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("part", range(8))
def test_whenever_it_dies(part):
    """Messages take so long, one more than the other, that some ranks have ended the round and others have not."""
    options = {"quorum": 3, "max_staleness": 1, "grace": 0.0}
    for order in range(15):
        at = 0.3 + 0.02 * (part + order / 15)
        agree_and_lose_nothing(options, [[[0.01] * 4] * 2] * 3, [Dies(order % 3, at=at)], order, jitter=0.02)


def agree_and_lose_nothing(options, steps, deaths, order, jitter):
    given_ = [0] * len(steps)
    world = SimulatedWorld(len(steps), seed=order, jitter=jitter, faults=deaths)
    outcomes = world.run(lambda comm: follow(comm, options, steps[comm.rank], given_))
    replay = f"{options=}, {steps=}, {deaths=}, {order=}, {jitter=}"
    left = [rank for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not left:
        return
    got = outcomes[left[0]]
    assert all(outcomes[rank] == got for rank in left), replay
    total = sum(result[0] for result in got)
    arrived = [total // MARK**rank % MARK for rank in range(len(steps))]
    for rank, number in enumerate(arrived):
        assert number == given_[rank] if rank in left else number <= given_[rank], replay
    assert sum(result[-1] for result in got) == sum(arrived), replay
    for result in got:
        assert set(result[3]) <= set(result[4]), replay
        assert set(left) <= set(result[4]), replay


def dies_in_the_middle(comm, on_death, quorum="solo"):
    """Rank 1 dies after 35 ms."""
    members = []
    with PartialAllreduce(torch.zeros(1), comm, on_death=on_death, quorum=quorum) as partial:
        for _ in range(10):
            comm.elapse(0.01)
            members += [result.members for result in partial.allreduce(torch.ones(1))]
        members += [result.members for result in partial.finish()]
    return members


def test_they_go_on_without_it_from_the_next_round_and_it_counts_no_longer():
    for quorum in ("solo", "majority", SIZE):
        world = SimulatedWorld(SIZE, faults=[Dies(1, at=0.035)])
        members = world.run(lambda comm, quorum=quorum: dies_in_the_middle(comm, "shrink", quorum))
        assert members[1] is None
        assert members[0] == members[2] == members[3]
        assert set(members[0]) == {(0, 1, 2, 3), (0, 2, 3)}
        assert members[0] == sorted(members[0], key=len, reverse=True)
        assert world.elapsed < 0.2


def test_each_that_is_left_says_once_whom_it_goes_on_without(caplog):
    faults = [Dies(1, at=0.035), Dies(3, at=0.065)]
    SimulatedWorld(SIZE, faults=faults).run(lambda comm: dies_in_the_middle(comm, "shrink"))
    said = Counter(re.findall(r"(\d) ranks go on without rank (\d); lost is what it gave", caplog.text))
    assert said == {("3", "1"): 3, ("2", "3"): 2}


@pytest.mark.parametrize("order", range(5))
def test_nobody_is_said_to_be_lost_who_has_only_closed(order, caplog):
    for run in (SimulatedWorld(3, seed=order, jitter=1e-2).run, partial(on_all, ranks(3))):
        run(lambda comm: dies_in_the_middle(comm, "shrink"))
    assert "go on without" not in caplog.text


def test_rounds_of_a_group_go_on_without_its_own_dead_only():
    """Groups of one world, side by side with rounds of all of its ranks."""

    def body(comm):
        group, settings = comm.split(comm.rank % 2), {"quorum": "solo", "on_death": "shrink"}
        own, like = torch.tensor([float(MARK**comm.rank)]), torch.zeros(1)
        with PartialAllreduce(like, group, **settings) as inner, PartialAllreduce(like, comm, **settings) as outer:
            results = []
            for partial in (inner, outer):
                got = []
                for _ in range(3):
                    comm.elapse(0.01)
                    got += partial.allreduce(own)
                got += partial.finish()
                results.append((int(sum(result.total for result in got)), got[-1].members))
        return results

    results = SimulatedWorld(5, faults=[Dies(3, at=0.025)]).run(body)
    evens, all_left = (3 * (1 + MARK**2 + MARK**4), (0, 1, 2)), (3 * (1 + MARK + MARK**2 + MARK**4), (0, 1, 2, 4))
    assert results[0] == results[2] == results[4] == [evens, all_left]
    assert results[1] == [(3 * MARK + 2 * MARK**3, (0,)), all_left]
    assert results[3] is None


def test_without_shrink_all_others_raise_one_error_that_names_it():
    def body(comm):
        try:
            dies_in_the_middle(comm, "error")
        except CollectiveError as error:
            return str(error)

    reasons = SimulatedWorld(SIZE, faults=[Dies(1, at=0.035)]).run(body)
    assert reasons[1] is None
    assert {*reasons} - {None} == {"rank 1 died after 0.035 virtual seconds"}


def test_a_rank_that_raises_in_its_own_code_is_gone_too():
    def body(comm):
        given_ = 0
        try:
            with PartialAllreduce(torch.zeros(1), comm, on_death="shrink") as partial:
                total = 0.0
                for step in range(5):
                    comm.elapse(1e-3)
                    if (comm.rank, step) == (2, 3):
                        raise ValueError("mine")
                    given_ += 1
                    total += sum(result.total.item() for result in partial.allreduce(torch.ones(1)))
                total += sum(result.total.item() for result in partial.finish())
        except ValueError:
            return None
        return total

    for totals in (SimulatedWorld(3).run(body), on_all(ranks(3), body)):
        assert totals[2] is None
        assert totals[0] == totals[1]
        assert 10 <= totals[0] <= 13


@pytest.mark.slow
@pytest.mark.parametrize("order", range(20))
def test_a_rank_that_raises_leaves_nothing_that_it_has_started(order):
    """Rank 0 raises in a round that it has entered. The world says at its end what has stayed behind."""

    def body(comm):
        through.append(comm.rank)
        with (
            suppress(ZeroDivisionError),
            PartialAllreduce(torch.zeros(1), comm, quorum=1, max_staleness=1, on_death="shrink") as partial,
        ):
            for step in range([5, 5, 0][comm.rank]):
                if (comm.rank, step) == (0, 3):
                    raise ZeroDivisionError
                partial.allreduce(torch.ones(1))
            list(partial.finish())
        through.remove(comm.rank)

    through = []
    SimulatedWorld(3, seed=order).run(body)
    assert not through


def test_who_was_left_out_says_so():
    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, on_death="shrink", quorum=3) as partial:
            if comm.rank == 0:
                partial._do(partial._machine.gone(1))  # as if its connection was lost
            return partial.allreduce(torch.ones(1))[0].members

    comms = ranks(3)
    outcomes = on_all(comms, body)
    assert outcomes[0] == outcomes[2] == (0, 2)
    assert str(outcomes[1]).startswith("rank 1 was left out: others have lost the connection to it")


def test_shrinking_is_refused_where_the_launcher_ends_the_job(monkeypatch):
    monkeypatch.setattr(Threads, "outlives_ranks", False)
    comm = ranks(2)[0]
    with pytest.raises(ValueError, match="under MPI the launcher ends the whole job"):
        PartialAllreduce(torch.zeros(1), comm, on_death="shrink")
    with pytest.raises(ValueError, match="on_death is 'ignore', expected 'error' or 'shrink'"):
        PartialAllreduce(torch.zeros(1), comm, on_death="ignore")
    assert isinstance(comm, Communicator)


def test_calls_of_the_others_fail_and_a_dead_rank_does_nothing_more():
    done = []

    def body(comm):
        try:
            for step in range(10):
                comm.elapse(0.01)
                done.append((comm.rank, step))
            barrier(comm)
        except CollectiveError as error:
            return str(error)

    assert (
        SimulatedWorld(3, faults=[Dies(1, at=0.035)]).run(body)[::2] == ["rank 1 died after 0.035 virtual seconds"] * 2
    )
    assert [step for rank, step in done if rank == 1] == [0, 1, 2]


def test_a_rank_joins_again_from_a_peers_state():
    """In another group of all ranks; the peer's own gradient that is in no round yet is not given twice."""

    def before(comm):
        with PartialAllreduce(torch.zeros(1), comm, on_death="shrink", quorum="solo") as partial:
            got = []
            for _ in range(6):
                comm.elapse(0.02 if comm.rank == 2 else 0.01)
                got += partial.allreduce(torch.ones(1))
            got += partial.synchronize()
            saved[comm.rank] = partial.state_dict(), sum(result.total.item() for result in got)

    def after(comm):
        joins = comm.rank == 2
        state, had = saved[0 if joins else comm.rank]
        with PartialAllreduce(torch.zeros(1), comm, on_death="shrink", quorum="majority") as partial:
            partial.load_state_dict(state, joins=joins)
            got = []
            for _ in range(3 + comm.rank):
                comm.elapse(0.01)
                got += partial.allreduce(torch.ones(1))
            got += partial.finish()
            assert {result.members for result in got} == {(0, 1, 2)}
            return had + sum(result.total.item() for result in got), partial.round

    saved = {}
    SimulatedWorld(3, faults=[Dies(2, at=0.05)]).run(before)
    assert sorted(saved) == [0, 1]
    assert saved[0][1] == saved[1][1]
    assert 12 <= saved[0][1] <= 14
    outcomes = SimulatedWorld(3).run(after)
    assert [total for total, _ in outcomes] == [saved[0][1] + 3 + 4 + 5] * 3
    assert outcomes[0][1] > saved[0][0]["machine"]["round"]


def test_of_a_peers_state_its_own_gradients_stay_with_it():
    def before(comm):
        with PartialAllreduce(torch.zeros(1), comm, on_death="shrink", quorum="solo") as partial:
            for _ in range(1 if comm.rank else 4):
                comm.elapse(0.05 if comm.rank else 1e-3)
                partial.allreduce(torch.ones(1))
            comm.elapse(1.0)
            saved[comm.rank] = partial.state_dict()
            barrier(comm)  # closing goes on with rounds

    def after(comm):
        with PartialAllreduce(torch.zeros(1), comm, on_death="shrink", quorum="solo") as partial:
            partial.load_state_dict(saved[1], joins=comm.rank == 0)
            pending = len(saved[1]["results"])
            return sum(result.total.item() for result in list(partial.finish())[pending:])

    saved = {}
    SimulatedWorld(2).run(before)
    assert [saved[rank]["deposits"][0]["count"] for rank in range(2)] == [0, 1]
    assert SimulatedWorld(2).run(after) == [1.0, 1.0]


@pytest.mark.parametrize("has_buffers", [False, True])
def test_eager_sgd_goes_on_with_the_mean_of_those_that_are_left(has_buffers):
    """Also where each rank keeps buffers of its own, which takes no meeting of all."""

    def body(comm):
        w = torch.nn.Parameter(torch.zeros(3))
        model = torch.nn.BatchNorm1d(3, affine=False) if has_buffers else None
        settings = {"model": model, "quorum": comm.size, "on_death": "shrink"}
        with EagerSGD(torch.optim.SGD([w], lr=1.0), [("w", w)], comm=comm, **settings) as optimizer:
            for _ in range(8):
                comm.elapse(0.01)
                w.grad = torch.full((3,), 2.0)
                optimizer.step()
        return w.tolist(), optimizer.applied

    outcomes = SimulatedWorld(4, faults=[Dies(1, at=0.045)]).run(body)
    assert outcomes[1] is None
    assert outcomes[0] == outcomes[2] == outcomes[3] == ([-16.0] * 3, 8)  # a full quorum: every mean is 2
