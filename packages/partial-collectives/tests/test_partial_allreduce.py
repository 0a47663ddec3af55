"""Partial allreduces in simulated worlds: nothing is lost, all ranks get the same rounds, whoever is late."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from communicators import Alone, CollectiveError, Link, SimulatedWorld, allreduce, barrier
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import PartialAllreduce
from partial_collectives.protocol.events import Kind
from ranks_on_threads import on_all, ranks

pytestmark = pytest.mark.quick

LIKE = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]


def gradients(rank, step):
    """Integer values that no other rank and step have."""
    return [torch.full_like(one, 1 + step + 16 * rank) for one in LIKE]


def total(given_):
    return [sum(parts) for parts in zip(*given_, strict=True)]


@st.composite
def plans(draw):
    """(settings, for each rank its parts between meetings: seconds of each step, whether it ends by close())."""
    size, parts = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    step = st.sampled_from([0.0, 1e-4, 1e-3, 5e-3])
    plan = [[draw(st.lists(step, max_size=4)) for _ in range(parts)] for _ in range(size)]
    return {
        "quorum": draw(st.one_of(st.sampled_from(["solo", "majority"]), st.integers(1, size))),
        "max_staleness": draw(st.integers(0, 3)),
        "grace": draw(st.sampled_from([0.0, 1e-3, "0.5x"])),
        "seed": draw(st.integers(0, 9)),
    }, [(part, draw(st.booleans())) for part in plan]


def follow(comm, settings, parts, closes):
    """What a rank gives, and the rounds that it gets."""
    given_, got, ends = [], [], []
    with PartialAllreduce(LIKE, comm, **settings) as partial:
        for number, part in enumerate(parts):
            for seconds in part:
                comm.elapse(seconds)
                given_.append(gradients(comm.rank, len(given_)))
                results = partial.allreduce(given_[-1])
                assert results
                got += results
            if number + 1 < len(parts):
                got += partial.synchronize()
                ends.append((partial.round, len(got)))
        if not closes:
            got += partial.finish()
    return given_, got, ends


@given(plans(), st.integers(0, 99))
def test_laws(plan, order):
    settings, ranks = plan
    world = SimulatedWorld(len(ranks), seed=order, jitter=2e-4)
    outcomes = world.run(lambda comm: follow(comm, settings, *ranks[comm.rank]))
    replay = f"plan={plan!r}, order={order}"
    given_ = [gradient for mine, _, _ in outcomes for gradient in mine]
    stayed = [got for (_, got, _), (_, closes) in zip(outcomes, ranks, strict=True) if not closes]
    if given_ and stayed:
        for one, other in zip(total(given_), total(result.total for result in stayed[0]), strict=True):
            assert torch.equal(one, other), replay
        assert sum(result.deposits for result in stayed[0]) == len(given_), replay
    for got in stayed:
        assert [said(result) for result in got] == [said(result) for result in stayed[0]], replay
        assert [result.round for result in got] == sorted({result.round for result in got}), replay
        assert all(max(result.staleness) <= settings["max_staleness"] for result in got), replay
    assert len({str(ends) for _, _, ends in outcomes}) == 1, replay


def said(result):
    return (*[one.tolist() for one in result.total], result.round, result.contributors, result.fresh, result.weight)


def test_a_full_quorum_is_an_allreduce():
    def body(comm):
        ours = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
        with PartialAllreduce(ours, comm, quorum=comm.size) as partial:
            comm.elapse(0.01 * comm.rank)
            (result,) = partial.allreduce(ours)
            assert torch.equal(result.total, allreduce(ours, comm, native=False))
            assert list(partial.finish()) == []

    SimulatedWorld(5).run(body)


def test_without_staleness_it_is_an_allreduce_too():
    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo", max_staleness=0) as partial:
            for step in range(4):
                comm.elapse(0.01 * ((comm.rank + step) % 3))
                (result,) = partial.allreduce(torch.tensor([float(step)]))
                assert result.total.item() == 3 * step
                assert result.contributors == (0, 1, 2)

    SimulatedWorld(3).run(body)


def slowest_last(comm, quorum, steps):
    """Median seconds of a call while the last rank takes 0.2 s a step and the others 1 ms."""
    slow, times = comm.rank == comm.size - 1, []
    with PartialAllreduce(torch.zeros(8), comm, quorum=quorum, max_staleness=500) as partial:
        for _ in range(3 if slow else steps):
            comm.elapse(0.2 if slow else 1e-3)
            begin = comm.clock()
            partial.allreduce(torch.ones(8))
            times.append(comm.clock() - begin)
        for _ in partial.finish():
            pass
        summary = partial.lateness.summary()
    return sorted(times)[len(times) // 2], summary


def test_solo_does_not_wait_for_a_straggler_and_says_who_it_is():
    for quorum in ("solo", 3):
        outcomes = SimulatedWorld(4).run(lambda comm, quorum=quorum: slowest_last(comm, quorum, 60))
        assert outcomes[0][0] < 0.002
        assert len({summary for _, summary in outcomes}) == 1
    seconds, summary = SimulatedWorld(4).run(lambda comm: slowest_last(comm, 4, 3))[0]
    assert 0.19 < seconds < 0.21
    assert summary == "rank 3 was last in 100 % of rounds, by 199 ms in the median"


def test_with_grace_more_are_fresh():
    def body(comm, grace):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo", grace=grace) as partial:
            comm.elapse(1e-3 * comm.rank)
            fresh = partial.allreduce(torch.ones(1))[0].fresh
            for _ in partial.finish():
                pass
        return fresh

    assert SimulatedWorld(4).run(lambda comm: body(comm, 0.0))[0] == (0,)
    assert SimulatedWorld(4).run(lambda comm: body(comm, 0.0025))[0] == (0, 1, 2)
    assert SimulatedWorld(4).run(lambda comm: body(comm, 1.0))[0] == (0, 1, 2, 3)  # all there: it waits no longer


def test_weights_travel_with_the_gradients():
    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum=2) as partial:
            (result,) = partial.allreduce(torch.tensor([1.0 + comm.rank]), weight=3.0 - 2 * comm.rank)
            assert (result.total.item(), result.weight) == (3 * 1 + 1 * 2, 4.0)

    SimulatedWorld(2).run(body)


def test_the_input_may_be_changed_at_once():
    def body(comm):
        with PartialAllreduce(torch.zeros(2), comm, quorum="solo") as partial:
            ours, got = torch.ones(2), []
            for _ in range(3):
                comm.elapse(1e-3 * comm.rank)
                ours.fill_(1)
                got += partial.allreduce(ours)
                ours.fill_(99)
            got += partial.finish()
        return sum(result.total for result in got).tolist()

    assert SimulatedWorld(3).run(body) == [[9.0, 9.0]] * 3


def test_a_state_goes_on_exactly():
    """Saved when no rank is in a step: what is accumulated and unapplied comes back, and nothing is lost."""

    def before(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo") as partial:
            got = []
            for step in range(1 if comm.rank == 2 else 4):  # rank 2 has rounds to apply, and a gradient that is late
                comm.elapse(0.05 if comm.rank == 2 else 1e-3)
                got += partial.allreduce(torch.tensor([float(1 + step + 10 * comm.rank)]))
            comm.elapse(1.0)
            state = partial.state_dict()
            barrier(comm)  # closing goes on with rounds
            return state, sum(result.total.item() for result in got)

    def after(comm):
        state, had = saved[comm.rank]
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo") as partial:
            partial.load_state_dict(state)
            return had + sum(result.total.item() for result in partial.finish())

    saved = SimulatedWorld(3).run(before)
    assert len({state["machine"]["round"] for state, _ in saved}) == 1
    assert any(state["deposits"][0]["count"] for state, _ in saved)
    assert SimulatedWorld(3).run(after) == [sum(1 + step for step in range(4)) * 2 + 40 + 21.0] * 3


@pytest.mark.parametrize("part", ["deposits", "results"])
@pytest.mark.parametrize(
    "like", [torch.zeros(5), torch.zeros(1), torch.zeros(3).int(), torch.zeros(3).double(), [torch.zeros(3)] * 2]
)
def test_a_state_of_another_like_is_refused_and_changes_nothing(like, part):
    def saved(like, times):
        partial = PartialAllreduce(like, Alone())
        for _ in range(times):
            partial.give(like)
        return partial.state_dict()

    state = saved(torch.ones(3), 2)  # a result, and a gradient in no round
    assert state["deposits"][0]["count"] == len(state["results"]) == 1
    if part == "results":
        state["deposits"] = saved(like, 1)["deposits"]
    with PartialAllreduce(like, Alone()) as partial:
        before = str(partial.state_dict())
        with pytest.raises(ValueError, match=rf"{part} of .*\(3,\), torch.float32.* are given, expected "):
            partial.load_state_dict(state)
        assert str(partial.state_dict()) == before
        partial.allreduce(like)


@pytest.mark.parametrize(("ranks", "others"), [(4, 2), (3, 2), (2, 4), (1, 2), (2, 1)])
def test_a_state_of_another_number_of_ranks_is_refused(ranks, others):
    def saved(comm):
        with PartialAllreduce(torch.zeros(1), comm) as partial:
            list(partial.allreduce(torch.ones(1)))
            list(partial.synchronize())
            return partial.state_dict()

    def loads(comm):
        with PartialAllreduce(torch.zeros(1), comm) as partial:
            with pytest.raises(ValueError, match=rf"the state is of {ranks} ranks, but these are {others}: "):
                partial.load_state_dict(states[comm.rank % ranks])
            got = [*partial.allreduce(torch.ones(1)), *partial.finish()]
            return sum(result.total.item() for result in got)

    states = SimulatedWorld(ranks).run(saved)
    assert SimulatedWorld(others).run(loads) == [others] * others


def fails(body, said, size=3):
    with pytest.raises(CollectiveError, match=said):
        SimulatedWorld(size).run(body)


def test_ranks_that_differ():
    fails(lambda comm: PartialAllreduce(torch.zeros(2 + comm.rank), comm), "ranks disagree on call 0")
    fails(lambda comm: PartialAllreduce(torch.zeros(2), comm, seed=comm.rank), "ranks disagree on call 0")


def test_a_rank_that_returns_without_a_word():
    def body(comm):
        partial = PartialAllreduce(torch.zeros(2), comm)
        if comm.rank != 1:
            partial.allreduce(torch.ones(2))
            for _ in partial.finish():
                pass

    fails(body, "deadlock.*already returned: rank 1")


def test_a_rank_that_gives_up_is_named_by_all():
    def body(comm):
        try:
            with PartialAllreduce(torch.zeros(2), comm) as partial:
                for step in range(9):
                    comm.elapse(1e-3)
                    if (comm.rank, step) == (1, 4):
                        raise ValueError("mine")
                    partial.allreduce(torch.ones(2))
        except (CollectiveError, ValueError) as error:
            return str(error)

    reasons = SimulatedWorld(3).run(body)
    assert reasons[1] == "mine"
    assert reasons[0] == reasons[2] == "rank 1 gave up its partial allreduce: ValueError: mine"


def test_after_a_failure_nothing_is_asked_for():
    """Who computes meanwhile hears of it when it gives, not when it takes."""

    def body(comm):
        partial, asked = PartialAllreduce([[torch.zeros(1)], [torch.zeros(1)]], comm), []
        if comm.rank == 1:
            partial.__exit__(ValueError, ValueError("mine"), None)
            return
        comm.elapse(1.0)
        with pytest.raises(CollectiveError, match="rank 1 gave up its partial allreduce: ValueError: mine"):
            partial.give(asked.append)
        assert not asked

    SimulatedWorld(2).run(body)


def test_rounds_that_a_rank_has_missed_are_counted_up_to_those_that_wait_for_it():
    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo", max_staleness=3) as partial:
            got = []
            for _ in range(2 if comm.rank else 8):
                comm.elapse(1.0 if comm.rank else 1e-3)
                got += partial.allreduce(torch.ones(1))
            got += partial.finish()
        return [result.staleness for result in got]

    assert SimulatedWorld(2).run(body) == [[(0, missed) for missed in (1, 2, 3, 0)] * 2] * 2


def test_bad_input():
    def body(comm):
        with pytest.raises(TypeError, match="like is no tensor"):
            PartialAllreduce([], comm)
        with pytest.raises(ValueError, match="expected 0 or more"):
            PartialAllreduce(torch.zeros(2), comm, grace=-1)
        with pytest.raises(ValueError, match="a share of the rounds' median"):
            PartialAllreduce(torch.zeros(2), comm, grace="half")
        partial = PartialAllreduce(torch.zeros(2), comm, quorum=2)
        with pytest.raises(ValueError, match=r"is given .*3.*expected .*2.*as in `like`"):
            partial.allreduce(torch.zeros(3))
        with pytest.raises(ValueError, match="weight is nan"):
            partial.allreduce(torch.zeros(2), weight=float("nan"))
        (result,) = partial.allreduce(torch.tensor([1.0, float("nan") if comm.rank else 2.0]))
        assert result.nonfinite == (1,)
        assert list(partial.finish()) == []
        with pytest.raises(RuntimeError, match="after finish"):
            partial.allreduce(torch.zeros(2))
        partial.close()
        with pytest.raises(RuntimeError, match="after close"):
            partial.allreduce(torch.zeros(2))
        partial.close()

    SimulatedWorld(2).run(body)


def test_one_rank_alone():
    with PartialAllreduce(torch.zeros(2), Alone(), quorum="majority") as partial:
        for step in range(3):
            (result,) = partial.allreduce(torch.full((2,), float(step)))
            assert (result.round, result.total.tolist()) == (step, [step, step])
        assert list(partial.synchronize()) == []
        assert list(partial.finish()) == []


class SignalsComeAtOnce(Alone):
    """A peer's signal comes in another thread before the signals are returned."""

    def signals(self, on_signal=None):
        made = super().signals(on_signal)
        errors = []

        def hear():
            try:
                on_signal(0, 8 * 0 + Kind.BEGIN)
            except BaseException as error:
                errors.append(error)

        self.thread, self.errors = threading.Thread(target=hear), errors
        self.thread.start()
        self.thread.join(0.2)  # it waits, or has failed
        return made


def test_a_signal_that_comes_while_it_is_made():
    comm = SignalsComeAtOnce()
    partial = PartialAllreduce(torch.zeros(2), comm)
    comm.thread.join()
    assert not comm.errors
    assert partial.round == 1
    partial.close()


def test_after_a_meeting_states_are_of_one_round_whoever_goes_on_first():
    """Rank 0 goes on at once, and a round begins before rank 1 has taken what the meeting gave, or its state."""

    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo") as partial:
            comm.elapse(1e-3 * comm.rank)
            partial.allreduce(torch.ones(1))
            got = []
            for result in partial.synchronize():
                got.append(result.round)
                comm.elapse(0.5 * comm.rank)  # applies it; meanwhile others go on
            comm.elapse(0.5 * comm.rank)
            state = partial.state_dict()
            for _ in range(3):
                partial.allreduce(torch.ones(1))
            later = [result.round for result in partial.finish()]
            return got, state, later

    outcomes = SimulatedWorld(3).run(body)
    machines = [state["machine"] for _, state, _ in outcomes]
    assert machines[0] == machines[1] == machines[2]
    assert all(not state["results"] and not state["deposits"][0]["count"] for _, state, _ in outcomes)
    assert len({tuple(got[-1:]) for got, _, _ in outcomes}) == 1


@pytest.mark.parametrize("reads", [None, 1], ids=["unread", "broken off"])
def test_a_meeting_that_was_not_read_to_its_end_is_an_error(reads):
    """It is an iterator: called alone it did nothing, and ranks went on, or saved states, without having met."""

    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo") as partial:
            comm.elapse(0.01 * (1 + comm.rank))
            partial.allreduce(torch.ones(1))
            meeting = partial.synchronize()
            if reads:
                next(meeting, None)
            for wrong in (
                partial.state_dict,
                lambda: partial.allreduce(torch.ones(1)),
                partial.synchronize,
                lambda: next(partial.finish()),
            ):
                with pytest.raises(RuntimeError, match=r"before synchronize\(\) was read to its end: `for result in"):
                    wrong()
            rounds = [result.round for result in meeting]
            partial.state_dict()
            return partial.round, len(rounds) <= 2

    [(round_, few), *others] = SimulatedWorld(3).run(body)
    assert few
    assert {one for one, _ in others} == {round_}


def test_a_meeting_that_has_raised_is_begun_anew():
    """Sizes that do not fit are no reason to refuse what comes after."""

    def body(comm):
        with PartialAllreduce(torch.zeros(2), comm, quorum="solo") as partial:
            partial.allreduce(torch.ones(2))
            with pytest.raises(ValueError, match="3"):
                list(partial.synchronize({0: (torch.ones(3), 1.0)}))
            rounds = [result.round for result in partial.synchronize({0: (torch.ones(2), 1.0)})]
            partial.state_dict()
            return partial.round, len(rounds)

    assert len({round_ for round_, _ in SimulatedWorld(3).run(body)}) == 1


def test_after_a_meeting_that_has_failed_calls_say_why():
    def body(comm):
        partial = PartialAllreduce(torch.zeros(2), comm, quorum="solo")
        if comm.rank == 1:
            partial.__exit__(OSError, OSError("full"), None)
            return
        for call in (lambda: list(partial.synchronize()), lambda: partial.allreduce(torch.ones(2)), partial.state_dict):
            with pytest.raises(CollectiveError, match="rank 1 gave up its partial allreduce: OSError: full"):
                call()

    SimulatedWorld(3).run(body)


@pytest.mark.parametrize("on_death", ["error", "shrink"])
def test_who_has_loaded_first_may_go_on_before_the_others_have_loaded(on_death):
    """Messages of very different speed; signals of the round that was saved must not begin the first one."""

    def before(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo") as partial:
            for _ in range(3):
                partial.allreduce(torch.ones(1))
            list(partial.synchronize())
            saved[comm.rank] = partial.state_dict()

    def after(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo", on_death=on_death) as partial:
            partial.load_state_dict(saved[comm.rank])
            got = [result for _ in range(3) for result in partial.allreduce(torch.ones(1))]
            got += partial.finish()
        assert min(result.round for result in got) >= saved[comm.rank]["machine"]["round"]
        return sum(result.total.item() for result in got)

    saved = {}
    SimulatedWorld(3).run(before)
    for seed in range(10):
        assert SimulatedWorld(3, seed=seed, jitter=0.5).run(after) == [9.0] * 3


NO_TENSORS = [3.0, None, np.ones(2), np.ones(()), [torch.zeros(2), 1.0], [np.ones(2, np.float32)]]


@pytest.mark.parametrize("like", [[], (), *NO_TENSORS])
def test_what_is_no_tensor_is_refused(like):
    with pytest.raises(TypeError, match=r"like is no tensor.*expected what to sum, torch\.from_numpy"):
        PartialAllreduce(like, Alone())


@pytest.mark.parametrize("tensor", [*NO_TENSORS, torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")])
def test_what_is_no_dense_tensor_is_not_summed(tensor):
    with PartialAllreduce(torch.zeros(2), Alone()) as partial:
        with pytest.raises(TypeError, match=r"is given .*expected a dense tensor.*; torch\.from_numpy"):
            partial.allreduce(tensor)
        with pytest.raises(TypeError, match=r"NoneType is given for fragment 0, expected \(tensors, weight\)"):
            partial.allreduce(lambda fragment: None)
        partial.allreduce(torch.ones(2))


@pytest.mark.parametrize(
    ("weight", "error"), [("8", TypeError), (None, TypeError), (1j, TypeError), (10**400, ValueError), (-1, ValueError)]
)
def test_a_weight_is_a_number(weight, error):
    with PartialAllreduce(torch.zeros(2), Alone()) as partial, pytest.raises(error, match=r"weight is .*, expected"):
        partial.allreduce(torch.ones(2), weight=weight)


def test_integers_have_whole_weights():
    with PartialAllreduce(torch.zeros(2).long(), Alone()) as partial:
        with pytest.raises(ValueError, match=r"weight is 0\.5, expected a whole number, as `like` holds integers"):
            partial.allreduce(torch.ones(2).long(), weight=0.5)
        for weight in (2, 2.0, np.float32(2), np.array(2.0), torch.tensor(2.0)):
            (result,) = partial.allreduce(torch.ones(2).long(), weight=weight)
            assert (result.total.tolist(), result.weight) == ([2, 2], 2.0)


@pytest.mark.parametrize(("name", "value"), [("weighted", "no"), ("weighted", 1), ("grace", True)])
def test_settings_of_other_types_are_refused(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name} is {value!r}, expected"):
        PartialAllreduce(torch.zeros(2), Alone(), **{name: value})


def test_what_is_not_contiguous_is_summed_by_its_places():
    ours = torch.arange(6.0).view(3, 2).t()
    with PartialAllreduce(ours, Alone()) as partial:
        assert torch.equal(partial.allreduce(ours)[0].total, ours)


def test_gradients_that_add_up_to_inf_before_their_round_are_said():
    def body(comm):
        got, x = [], torch.tensor([6e4, 1.0], dtype=torch.float16)
        with PartialAllreduce(x, comm, quorum="solo") as partial:
            if comm.rank == 0:
                comm.elapse(0.1)
                got += partial.allreduce(torch.ones(2, dtype=torch.float16))
            else:
                for _ in range(3):
                    partial.give(x)
            got += partial.finish()
        assert [bool(result.total.isfinite().all()) for result in got] == [result.nonfinite == () for result in got]
        return [result.nonfinite for result in got]

    assert (1,) in SimulatedWorld(2).run(body)[0]


NO_SUM = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(
    "like", [*(torch.zeros(2, dtype=dtype) for dtype in NO_SUM), torch.zeros(2).to_sparse(), torch.zeros(2).to("meta")]
)
def test_tensors_that_do_not_add_are_refused(like):
    with pytest.raises(TypeError, match="expected dense tensors of a dtype that adds"):
        PartialAllreduce([torch.zeros(1), like], Alone())


def test_memory_of_what_gives_the_sizes_is_not_kept():
    def body(comm):
        like = torch.zeros(3)
        kept = weakref.ref(like)
        PartialAllreduce(like, comm)  # the engine holds its signals, as it is not closed
        del like
        gc.collect()
        return kept() is None

    assert all(on_all(ranks(2), body))


@pytest.mark.parametrize("number", [True, -1, 1.0, "1"])
def test_it_begins_at_a_whole_number(number):
    with PartialAllreduce(torch.zeros(1), Alone()) as partial:
        with pytest.raises(ValueError, match=f"a round's number is {number!r}, expected a whole one from 0 on"):
            partial.begin_at(number)
        partial.begin_at(0)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0, 2.0, 3.0, 3.5])
def test_a_state_in_the_middle_of_a_round_is_that_of_its_end(seconds):
    """Rank 1 takes part in what rank 0 begins, whatever it does meanwhile."""

    def body(comm):
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo") as partial:
            state = None
            if comm.rank:
                comm.elapse(seconds)
                state = partial.state_dict()
            else:
                partial.allreduce(torch.ones(1))
            list(partial.finish())
            return state

    state = SimulatedWorld(2, link=Link(1.0, 0.0)).run(body)[1]
    begun = state["machine"]["round"]
    assert [result["round"] for result in state["results"]] == list(range(begun))
    assert begun >= (seconds >= 1.0)
