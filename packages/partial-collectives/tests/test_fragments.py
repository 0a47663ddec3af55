"""Rounds of fragments, which take turns, and rounds in fewer bits: nothing is lost, whoever is late."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import pytest
import torch
from communicators import Elastic, SimulatedWorld, barrier
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import EagerSGD, PartialAllreduce

pytestmark = pytest.mark.quick

SIZES = ((3,), (1, 700), (0,), (130, 2))
"""Elements of the tensors of each fragment."""


def like(fragments):
    return [[torch.zeros(numel) for numel in SIZES[fragment]] for fragment in range(fragments)]


def integers(comm, step, fragment):
    """That float32 sums exactly, however they are rounded."""
    draw = torch.Generator().manual_seed(1000 * comm.rank + 10 * step + fragment)
    return [torch.randint(-999, 1000, (numel,), generator=draw).float() for numel in SIZES[fragment]]


@st.composite
def plans(draw):
    """(settings, fragments, for each rank its parts between meetings: seconds of each step)."""
    size, parts, fragments = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    step = st.sampled_from([0.0, 1e-4, 1e-3, 5e-3])
    return (
        {
            "quorum": draw(st.one_of(st.sampled_from(["solo", "majority"]), st.integers(1, size))),
            "max_staleness": draw(st.integers(0, 3)),
            "grace": draw(st.sampled_from([0.0, 1e-3])),
            "compress": draw(st.sampled_from([None, "int8", "int4", "int2"])),
        },
        fragments,
        [[draw(st.lists(step, max_size=4)) for _ in range(parts)] for _ in range(size)],
    )


class Follower:
    """A rank that gives, and applies the rounds that it gets."""

    def __init__(self, comm, fragments, settings):
        self.comm, self.given, self.applied, self.rounds = comm, like(fragments), like(fragments), []
        self.partial = PartialAllreduce(like(fragments), comm, **settings)

    def own(self, step, fragment):
        values = integers(self.comm, step, fragment)
        add(self.given[fragment], values)
        return values

    def apply(self, results):
        for result in results:
            add(self.applied[result.fragment], result.total)
            self.rounds.append((result.round, result.fragment, result.contributors))

    def step(self, seconds, step, *, beside=0.0):
        self.comm.elapse(seconds)
        self.partial.give(lambda fragment: (self.own(step, fragment), 1.0))
        self.comm.elapse(beside)
        self.apply(self.partial.take())

    def last(self, step, fragments):
        return {fragment: (self.own(step, fragment), 1.0) for fragment in fragments}


def add(acc, tensors):
    for one, other in zip(acc, tensors, strict=True):
        one += other


def flat(lists):
    return torch.cat([one for each in lists for one in each])


@given(plans(), st.integers(0, 99), st.sampled_from([0.0, 2e-3]))
def test_what_is_given_is_applied_or_still_there(plan, order, beside):
    settings, fragments, ranks = plan

    def body(comm):
        rank = Follower(comm, fragments, settings)
        for number, part in enumerate(ranks[comm.rank]):
            for step, seconds in enumerate(part):
                rank.step(seconds, 5 * number + step, beside=beside)
            last = rank.last(50 + number, range(comm.rank % (fragments + 1)))
            ends = number + 1 == len(ranks[comm.rank])
            rank.apply(rank.partial.finish(last) if ends else rank.partial.synchronize(last))
        residual = [[torch.zeros(numel) for numel in SIZES[f]] for f in range(fragments)]
        for acc, kept in zip(residual, rank.partial.residuals, strict=True):
            add(acc, kept or [torch.zeros_like(one) for one in acc])
        rank.partial.close()
        return flat(rank.given), flat(rank.applied), flat(residual), rank.rounds

    outcomes = SimulatedWorld(len(ranks), seed=order, jitter=2e-4).run(body)
    given_, residual = (torch.stack([outcome[which] for outcome in outcomes]).sum(0) for which in (0, 2))
    for _, applied, _, rounds in outcomes:
        assert torch.equal(applied + residual, given_), f"{plan=}, {order=}"
        assert rounds == outcomes[0][3]
        assert all(fragment == round_ % fragments for round_, fragment, _ in rounds)
    if settings["compress"] is None:
        assert not residual.any()


@pytest.mark.parametrize("fragments", [1, 3])
def test_ranks_in_step_give_every_fragment_in_turn(fragments):
    def body(comm):
        rank = Follower(comm, fragments, {"quorum": comm.size})
        for step in range(7):
            rank.step(1e-3, step, beside=1e-3)
        list(rank.partial.finish())
        rank.partial.close()
        return rank.rounds

    rounds = [(step, step % fragments, (0, 1, 2)) for step in range(7)]
    assert SimulatedWorld(3).run(body) == [rounds] * 3


def test_a_late_rank_gives_the_fragment_of_the_round_that_it_comes_to():
    """And so it is in that round, however many it has missed."""

    def body(comm):
        rank = Follower(comm, 3, {"quorum": "solo", "max_staleness": 9})
        for step in range(5 if comm.rank else 25):
            rank.step(1e-3 if comm.rank < 2 else 5.3e-3, step)
        list(rank.partial.finish())
        rank.partial.close()
        return rank.rounds

    rounds = SimulatedWorld(3).run(body)[0]
    late = [round_ for round_, _, contributors in rounds if 2 in contributors]
    assert len(late) >= 4
    assert any(later - earlier not in (1, 3) for earlier, later in pairwise(late))


def test_a_round_in_four_bits_takes_an_eighth_of_the_bytes():
    def body(comm, compress):
        x = torch.randn(60_000, generator=torch.Generator().manual_seed(comm.rank))
        before = comm.bytes_sent
        with PartialAllreduce(x, comm, quorum=comm.size, compress=compress) as partial:
            partial.allreduce(x)
            list(partial.finish())
        return comm.bytes_sent - before

    full, rounded = (SimulatedWorld(4).run(lambda comm, c=compress: body(comm, c))[0] for compress in (None, "int4"))
    assert full / rounded == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("compress", ["int8", "int4", "int2"])
@pytest.mark.parametrize(("value", "ranks"), [(float("nan"), [1]), (float("-inf"), [0, 2]), (3e38, [0, 1])])
def test_what_is_not_finite_spoils_no_later_round(value, ranks, compress, weighted):
    """Of a contribution, or of the sum of finite ones."""

    def body(comm):
        got, x = [], torch.ones(1100)
        settings = {"quorum": comm.size, "max_staleness": 0, "compress": compress, "weighted": weighted}
        with PartialAllreduce(x, comm, **settings) as partial:
            for number in range(4):
                x[:3] = value if number == 1 and comm.rank in ranks else 1.0
                got += partial.allreduce(x)
        assert [result.nonfinite for result in got] == [(), () if value == 3e38 else tuple(ranks), (), ()]
        assert not got[1].total[:3].isfinite().any()
        assert got[1].total[1024:].isfinite().all()
        return torch.stack([got[number].total for number in (0, 2, 3)])

    assert all(torch.equal(totals, torch.full((3, 1100), 3.0)) for totals in SimulatedWorld(3).run(body))


@pytest.mark.parametrize("compress", [None, "int2"])
def test_a_run_goes_on_as_if_it_had_not_stopped(compress):
    """Saved where a rank has something in no round yet, and rounds that it has not applied."""
    settings = {"quorum": "solo", "compress": compress}

    def steps(rank, numbers):
        for step in numbers:
            rank.step(1e-3 * (1 + 3 * (rank.comm.rank == 2)), step)

    def stops(comm):
        rank = Follower(comm, 2, settings)
        steps(rank, range(5))
        comm.elapse(1.0)
        file = io.BytesIO()
        torch.save(rank.partial.state_dict(), file)
        barrier(comm)
        list(rank.partial.finish())
        return file.getvalue(), flat(rank.applied)

    def goes_on(comm):
        rank = Follower(comm, 2, settings)
        if saved:
            rank.partial.load_state_dict(torch.load(io.BytesIO(saved[comm.rank][0]), weights_only=True))
            add([rank.applied[0][0], *rank.applied[1]], saved[comm.rank][1].split([3, 1, 700]))
        else:
            steps(rank, range(5))
            comm.elapse(1.0)
        barrier(comm)
        steps(rank, range(5, 9))
        rank.apply(rank.partial.finish(rank.last(9, range(2))))
        rank.partial.close()
        return flat(rank.applied).tolist()

    saved = []
    without = SimulatedWorld(3).run(goes_on)
    saved = SimulatedWorld(3).run(stops)
    assert SimulatedWorld(3).run(goes_on) == without


def test_a_state_taken_after_a_meeting_has_the_residuals_of_the_meeting():
    """Others have gone on meanwhile, and rounds with them."""

    def body(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        partial = PartialAllreduce(torch.zeros(64), comm, quorum="solo", compress="int2")
        for _ in range(3):
            partial.allreduce(torch.randn(64, generator=draw))
        list(partial.synchronize())
        there = partial.residuals[0][0].clone()
        if comm.rank == 0:
            partial.allreduce(torch.randn(64, generator=draw))
        else:
            comm.elapse(1.0)
            assert not torch.equal(partial.residuals[0][0], there)
            assert torch.equal(partial.state_dict()["residuals"][0][0], there)
        list(partial.finish())
        partial.close()

    SimulatedWorld(2).run(body)


def test_two_gradients_in_one_round_make_no_empty_ones():
    def body(comm):
        rank = Follower(comm, 2, {"quorum": "solo"})
        if comm.rank == 0:
            for number in range(3):
                rank.partial.give(lambda fragment, n=number: (rank.own(n, fragment), 1.0), leaving=number)
            comm.elapse(1.0)
            for number in range(3):
                rank.apply(rank.partial.take(leaving=2 - number))
        comm.elapse(2.0 + (comm.rank > 0))
        rounds = rank.partial.round
        list(rank.partial.finish())
        rank.partial.close()
        return rounds

    assert SimulatedWorld(3).run(body) == [3] * 3


@pytest.mark.parametrize("elastic", [False, True])
def test_eager_sgd_goes_on_with_its_residuals(elastic):
    """From a checkpoint, over an Elastic too, whose rounds begin anew."""

    def made(comm):
        p = torch.nn.Parameter(torch.zeros(64))
        inner, world = torch.optim.SGD([p], lr=0.1), Elastic(comm) if elastic else comm
        return p, EagerSGD(inner, [("p", p)], comm=world, quorum=comm.size, compress="int2")

    def trains(comm, p, optimizer, numbers):
        for number in numbers:
            comm.elapse(1e-3)
            p.grad = torch.randn(64, generator=torch.Generator().manual_seed(100 * comm.rank + number))
            optimizer.step()

    def ends(comm, p, optimizer):
        trains(comm, p, optimizer, range(6, 12))
        optimizer.finish()
        optimizer.close()
        return p.tolist()

    def begins(comm):
        p, optimizer = made(comm)
        trains(comm, p, optimizer, range(6))
        optimizer.synchronize()
        return p, optimizer

    def saves(comm):
        p, optimizer = begins(comm)
        saved = copy.deepcopy((p.data, optimizer.state_dict()))
        optimizer.finish()
        optimizer.close()
        return saved

    def resumes(comm):
        p, optimizer = made(comm)
        p.data.copy_(saved[comm.rank][0])
        optimizer.load_state_dict(saved[comm.rank][1])
        return ends(comm, p, optimizer)

    saved = SimulatedWorld(2).run(saves)
    assert SimulatedWorld(2).run(resumes) == SimulatedWorld(2).run(lambda comm: ends(comm, *begins(comm)))


def test_errors_say_what_is_expected():
    def body(comm):
        for wrong, error, said in (
            (lambda: PartialAllreduce(torch.zeros(3), comm, compress="int3"), ValueError, "expected None or one of"),
            (lambda: PartialAllreduce(torch.zeros(3).double(), comm, compress="int8"), TypeError, "float32 alone"),
            (lambda: PartialAllreduce([[torch.zeros(3)], []], comm), TypeError, "expected what to sum"),
        ):
            with pytest.raises(error, match=said):
                wrong()
        partial = PartialAllreduce(like(2), comm)
        for wrong, error, said in (
            (lambda: partial.allreduce([torch.zeros(3)]), TypeError, "a function of the fragment"),
            (lambda: partial.allreduce(lambda fragment: ([torch.zeros(4)], 1.0)), ValueError, "as in `like`"),
            (lambda: list(partial.finish({1: ([torch.zeros(1)], 1.0)})), ValueError, "as in `like`"),
            (lambda: list(partial.finish({2: ([torch.zeros(1)], 1.0)})), ValueError, "fragment 2"),
        ):
            with pytest.raises(error, match=said):
                wrong()
        assert partial.take() == []
        partial.close()

    SimulatedWorld(2).run(body)
