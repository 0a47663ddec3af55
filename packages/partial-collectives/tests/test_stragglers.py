"""Who is late, injected delays, and deadlines for micro-batches."""

from __future__ import annotations

import threading

import pytest
from partial_collectives import Lateness, injected_delays, until_deadline
from partial_collectives.protocol.events import Header, Stage
from partial_collectives.stragglers import MOST_ROUNDS, NOTHING_NEW, Arrivals

pytestmark = pytest.mark.quick


def test_arrivals_are_told_against_the_round_that_they_were_for():
    arrivals = Arrivals()
    arrivals.arrived(1.0)
    assert arrivals.began(0, 1.5, fresh=True) == (-0.5, 0)
    assert arrivals.began(1, 2.0, fresh=False) == NOTHING_NEW  # too late for rounds 1 and 2
    assert arrivals.began(2, 3.0, fresh=False) == NOTHING_NEW
    arrivals.arrived(4.0)
    assert arrivals.began(3, 5.0, fresh=False) == (2.0, 1)
    arrivals.arrived(5.5)  # for round 3, which it entered without
    arrivals.arrived(6.0)
    assert arrivals.began(4, 7.0, fresh=True) == (0.5, 3)


def test_the_summary():
    lateness = Lateness(3)
    assert lateness.summary() == "no round has been measured"
    for round_, late in enumerate([0.18, 0.2, 0.1, -1.0]):
        tells = [Header(Stage.RUNNING, late=seconds, late_round=round_) for seconds in (-0.01, 0.0)]
        lateness.record([*tells, Header(Stage.RUNNING)])
        lateness.record([Header(Stage.RUNNING)] * 2 + [Header(Stage.RUNNING, late=late, late_round=round_)])
    assert lateness.summary() == "rank 2 was last in 75 % of rounds, by 185 ms in the median"
    assert lateness.last()[1] == [pytest.approx(0.505)]


def test_delays_as_in_the_paper():
    assert [injected_delays("fixed:1,2=0.2", rank, 4)(7) for rank in range(4)] == [0.0, 0.2, 0.2, 0.0]
    assert [injected_delays("linear=0.001", rank, 4)(7) for rank in range(4)] == [0.0, 0.001, 0.002, 0.003]
    drawn = [injected_delays("random:2=0.32", rank, 8, seed=3) for rank in range(8)]
    held_up = [tuple(rank for rank in range(8) if drawn[rank](step)) for step in range(50)]
    assert all(len(ranks) == 2 for ranks in held_up)
    assert len(set(held_up)) > 10
    assert injected_delays("", 0, 1)(0) == 0.0
    assert [injected_delays("random:4=0.1", rank, 4)(7) for rank in range(4)] == [0.1] * 4
    assert injected_delays("random:0=0.1", 0, 4)(7) == injected_delays("fixed:0=0", 0, 4)(7) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("fixed:1", "fixed:x=1", "random=1", "often:1=1", "linear=-1", "linear=nan", "fixed:1=inf", "random:5=1"),
        *("linear:3=1", "linear:=1"),
    ],
)
def test_delays_that_are_none(text):
    with pytest.raises(ValueError, match=r"delays are .*expected 'fixed"):
        injected_delays(text, 0, 4)


def test_a_delay_of_a_rank_that_is_none():
    with pytest.raises(ValueError, match=r"but ranks are 0 … 3"):
        injected_delays("fixed:4=1", 0, 4)


def test_a_deadline_ends_a_step_but_never_before_its_first_micro_batch():
    now = iter([0.0, 0.4, 0.9, 1.0]).__next__
    assert list(until_deadline("abcd", 1.0, clock=now)) == ["a", "b", "c"]
    assert list(until_deadline("ab", 1e-9)) == ["a"]
    assert list(until_deadline("", 1.0)) == []
    with pytest.raises(ValueError, match="more than 0"):
        list(until_deadline("a", 0))


def tells(round_, *late):
    return [Header(Stage.RUNNING, late=seconds, late_round=round_) for seconds in late]


def test_lateness_is_of_the_last_rounds_and_takes_no_more_memory_with_every_one():
    lateness = Lateness(2)
    for round_ in range(MOST_ROUNDS):
        lateness.record(tells(round_, 0.0, 1.0))
    for round_ in range(MOST_ROUNDS, 2 * MOST_ROUNDS):
        lateness.record(tells(round_, 1.0, 0.0))
    assert len(lateness.rounds) == MOST_ROUNDS
    assert lateness.summary() == "rank 0 was last in 100 % of rounds, by 1000 ms in the median"


def test_lateness_may_be_asked_while_rounds_go_on():
    """They end in the background engine's thread."""
    lateness = Lateness(3)

    def rounds():
        for round_ in range(20_000):
            lateness.record(tells(round_, 0.0, 1.0, 2.0))

    ends = threading.Thread(target=rounds)
    ends.start()
    while ends.is_alive():
        assert lateness.summary()
    ends.join()
