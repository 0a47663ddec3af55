"""The protocol alone, under every order of events that hypothesis finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import Case, Play, case_of, random_case
from partial_collectives import injected_delays
from partial_collectives.protocol.events import Header, Join
from partial_collectives.protocol.machine import Machine
from partial_collectives.protocol.rules import Rules, check_rules

pytestmark = pytest.mark.quick


@st.composite
def cases(draw, most_ranks=8):
    size = draw(st.integers(1, most_ranks))
    meetings = draw(st.integers(1, 3))
    part = st.tuples(*[st.integers(0, 4)] * meetings)
    return Case(
        size=size,
        quorum=draw(st.one_of(st.sampled_from(["solo", "majority"]), st.integers(1, size))),
        max_staleness=draw(st.integers(0, 3)),
        grace=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        steps=draw(st.tuples(*[part] * size)),
        choices=tuple(draw(st.lists(st.integers(0, 1 << 16), max_size=120))),
        deaths=tuple(draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))),
        rejoin=draw(st.booleans()),
        fragments=draw(st.sampled_from([1, 1, 2, 3])),
    )


@settings(max_examples=400)
@given(cases())
def test_nothing_is_lost_and_all_agree_and_nobody_hangs(case):
    Play(case).run()


def test_what_a_rank_that_is_gone_said_comes_late():
    """It had told one of two others to begin, whom that word reached when both had gone on without it."""
    again = (
        '{"size": 3, "quorum": 2, "max_staleness": 1, "grace": false, "seed": 1059493428, '
        '"steps": [[5, 4, 0], [1, 3, 5], [3, 3, 5]], "choices": [], "deaths": [0], "rejoin": true}'
    )
    Play(case_of(again)).run()


def in_random_order(size, rounds, quorum):
    """Ranks arrive in an order of their own in each round, and signals take no time; how many were fresh."""
    order, fresh = random.Random(3), []
    ranks = [Machine(rank, size, Rules(quorum, max_staleness=rounds)) for rank in range(size)]
    joined = {}

    def do(source, actions):
        for action in actions:
            if isinstance(action, Join):
                joined[source] = Header(action.stage, action.contributes, action.fresh)
            else:
                do(action.peer, ranks[action.peer].heard(source, action.kind, action.round))

    for _ in range(rounds):
        for rank in order.sample(range(size), size):
            late = len(joined) == size
            do(rank, ranks[rank].deposited(behind=late))
        headers = [joined[rank] for rank in range(size)]
        joined.clear()
        fresh.append(sum(header.fresh for header in headers))
        for rank in range(size):
            assert not ranks[rank].completed(headers)
    return fresh


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_majority_is_fresh_in_the_mean(size):
    """(P + 1)/2, where arrivals are independent of the draw; within five deviations of the mean of 2,500 rounds."""
    fresh = in_random_order(size, 2_500, "majority")
    deviation = ((size * size - 1) / 12 / len(fresh)) ** 0.5
    assert abs(sum(fresh) / len(fresh) - (size + 1) / 2) < 5 * deviation
    assert set(fresh) == set(range(1, size + 1))


@pytest.mark.parametrize(("quorum", "expected"), [("solo", 1), (1, 1), (3, 3), (5, 5)])
def test_so_many_are_fresh(quorum, expected):
    assert set(in_random_order(5, 200, quorum)) == {expected}


def test_the_draw_is_the_same_everywhere_and_even():
    drawn = [Rules(seed=4).drawn(round_, among=[5, 1, 3]) for round_ in range(3000)]
    assert drawn == [Rules(seed=4).drawn(round_, among={1, 3, 5}) for round_ in range(3000)]
    assert all(abs(drawn.count(rank) - 1000) < 5 * (3000 * 2 / 9) ** 0.5 for rank in (1, 3, 5))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"quorum": "most"}, ValueError, "expected 'solo', 'majority' or a number"),
        ({"quorum": 5}, ValueError, "there are 4 ranks"),
        ({"quorum": True}, TypeError, "quorum is True"),
        ({"max_staleness": -1}, ValueError, "expected 0"),
        ({"max_staleness": 1.0}, TypeError, "max_staleness is 1.0"),
    ],
)
def test_bad_rules(settings, error, said):
    given_ = {"quorum": "solo", "max_staleness": 1, "grace": False, "seed": 0, "size": 4, **settings}
    with pytest.raises(error, match=said):
        check_rules(**given_)


def test_a_case_is_played_again_from_its_line():
    case = random_case(random.Random(1), 4)
    assert case_of(case.line.split("interleaving.py '")[1].rstrip("'")) == case


def test_the_draw_is_independent_of_injected_delays():
    """Of the same seed: else the rank that is waited for would always be the one that is held up."""
    held_up = [injected_delays("random:1=1", rank, 8, seed=0) for rank in range(8)]
    met = sum(held_up[Rules(seed=0).drawn(step, among=range(8))](step) for step in range(2000))
    assert abs(met - 2000 / 8) < 5 * (2000 * 7 / 64) ** 0.5
