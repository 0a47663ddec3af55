"""A rank that is merely slow is no error, however long it takes; one that does not answer is, within the time-out."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import EagerSGD, PartialAllreduce
from partial_collectives.protocol.rules import Rules
from partial_collectives.pulse import ASKS, HEARD, WIDER, Pulse
from ranks_on_threads import on_all, ranks

pytestmark = pytest.mark.quick

HOURS = 7200.0
"""Many time-outs."""


def slow_everywhere(comm, quorum):
    """Rank 1 takes hours for a step, before a meeting, before the end, and before it closes."""
    slow, got = comm.rank == 1, 0.0

    def computes():
        comm.elapse(HOURS if slow else 1e-3)

    rounds = PartialAllreduce(torch.zeros(1), comm, quorum=quorum, max_staleness=1)
    for _ in range(3):
        computes()
        got += sum(result.total.item() for result in rounds.allreduce(torch.ones(1)))
    computes()
    got += sum(result.total.item() for result in rounds.synchronize())
    computes()
    got += sum(result.total.item() for result in rounds.finish())
    computes()
    rounds.close()
    return got


@pytest.mark.parametrize("quorum", ["solo", "majority", 3])
def test_a_rank_that_takes_hours(quorum):
    assert SimulatedWorld(3).run(lambda comm: slow_everywhere(comm, quorum)) == [9.0] * 3


class Heard(logging.Handler):
    """Sets an event with the first warning."""

    def __init__(self):
        super().__init__()
        self.event, self.said = threading.Event(), ""

    def emit(self, record):
        self.said = record.getMessage()
        self.event.set()


@pytest.fixture
def warning():
    handler, logger = Heard(), logging.getLogger("partial_collectives.pulse")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.slow
def test_who_waits_for_longer_than_the_time_out_says_so_and_goes_on(warning):
    """Real time: the slow rank computes until the others have waited for longer than their time-out."""
    comms = ranks(3)

    def body(comm):
        comm.timeout = 1.0
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo", max_staleness=0) as rounds:
            if comm.rank == 1:
                assert warning.event.wait(30)
            (result,) = rounds.allreduce(torch.ones(1))
        return result.total.item()

    assert on_all(comms, body) == [3.0] * 3
    assert "in partial round 0 for" in warning.said
    assert "all ranks live" in warning.said


@pytest.mark.slow
def test_who_waits_for_one_that_waits_elsewhere_says_what_to_do(warning):
    """Rank 0 of two, drawn for the second round, goes to a barrier instead of giving to it."""
    comms = ranks(2)
    seed = next(seed for seed in range(99) if [Rules(seed=seed).drawn(round_, range(2)) for round_ in (0, 1)] == [0, 0])

    def body(comm):
        comm.timeout = 1.0
        with PartialAllreduce(torch.zeros(1), comm, quorum="majority", seed=seed) as rounds:
            for _ in range(1 + comm.rank):
                rounds.allreduce(torch.ones(1))
            if comm.rank == 0:
                assert warning.event.wait(30)

    on_all(comms, body)
    assert "waits in partial round 1 for rank 0 to begin it, which must synchronize() before" in warning.said


def test_a_rank_that_does_not_answer_is_named_by_all_others():
    """As a stopped process is: neither it nor its engine takes anything."""
    comms, stopped = ranks(3), threading.Event()

    def body(comm):
        comm.timeout = 1.0
        rounds = PartialAllreduce(torch.zeros(1), comm, quorum=3)
        if comm.rank == 1:
            line = rounds._signals._comm.transport.line
            line.received = list
            assert stopped.wait(30)
            return None
        try:
            rounds.allreduce(torch.ones(1))
        except CollectiveError as error:
            return str(error)
        finally:
            stopped.set()

    said = on_all(comms, body)
    expected = "rank 1 has not answered for 1 s, not even in the background: its process is stopped, or cannot be"
    assert said[0] == said[2]
    assert said[0].startswith(expected)


def test_where_ranks_come_and_go_others_go_on_without_one_that_does_not_answer():
    """As in the group of an `Elastic`, which tells it that it was left out."""
    comms, over = ranks(2), threading.Event()

    def body(comm):
        comm.hasty = True
        rounds = PartialAllreduce(torch.zeros(1), comm, quorum=2)
        if comm.rank == 1:
            line = rounds._signals._comm.transport.line
            hears, line.received = line.received, list
            if not over.wait(10):  # or rank 0 would wait without end
                line.received = hears
                rounds.allreduce(torch.ones(1))
            return None
        comm.timeout = 0.3
        try:
            (result,) = rounds.allreduce(torch.ones(1))
        finally:
            over.set()
        return result.members, rounds.given_up

    assert on_all(comms, body) == [((0,), {1}), None]


@pytest.mark.slow
def test_two_ranks_that_do_not_hear_each_other_are_found_though_all_others_hear_both():
    """One of them counts the arrivals, and the other, which is not next to it, arrives."""
    comms = ranks(5)

    def body(comm):
        comm.timeout = 1.0
        rounds = PartialAllreduce(torch.zeros(1), comm, quorum=5)
        drawn = rounds._machine.coordinator
        deaf = {drawn: (drawn + 2) % 5, (drawn + 2) % 5: drawn}.get(comm.rank)
        line = rounds._signals._comm.transport.line
        hears = line.received
        line.received = lambda: [message for message in hears() if message[0] != deaf]
        try:
            rounds.allreduce(torch.ones(1))
        except CollectiveError as error:
            return str(error)

    (said,) = set(on_all(comms, body))
    assert "has not answered for 1 s" in said


@given(st.lists(st.sampled_from(["feels", "answers"]), max_size=60))
def test_a_pulse(events):
    """In vain once ASKS questions in a row had no answer, the first of them one look after the last sign of life."""
    asked, answered, unanswered = [], {1}, HEARD
    pulse = Pulse(0, 9.0, asked.append, answered, set())
    for event in events:
        if event == "answers":
            answered.add(1)
            unanswered = HEARD
        else:
            asked.clear()
            silent = pulse.feel([1], (), "rank 0 waits")
            assert silent == ([1] if unanswered >= ASKS else [])
            if silent:
                assert pulse.silence(1).startswith("rank 1 has not answered for 9 s")
                return
            unanswered += 1
            assert asked == [1] * (unanswered > 0)


@dataclass
class Ring:
    """Ranks whose waiting ones look in turn, each answered before the next look. dark: pairs whose link is broken.

    asked: questions of the last look of all. found: of each rank that waits, those that it takes for gone.
    """

    ranks: int
    dead: frozenset[int]
    waiting: frozenset[int]
    dark: frozenset[frozenset[int]] = frozenset()
    asked: int = 0

    def __post_init__(self):
        self.found = {rank: set() for rank in self.waiting}
        self._heard = {rank: (set(), set()) for rank in range(self.ranks)}
        self._pulses = {rank: Pulse(rank, 9.0, partial(self._ask, rank), *self._heard[rank]) for rank in self.waiting}

    def _ask(self, source, target):
        self.asked += 1
        if target not in self.dead and frozenset({source, target}) not in self.dark:
            self._hears(target, source, waits=True)
            self._hears(source, target, waits=target in self.waiting)

    def _hears(self, rank, of, *, waits):
        answered, waiting = self._heard[rank]
        answered.add(of)
        (waiting.add if waits else waiting.discard)(of)

    def look(self, needs=()):
        """Each waiting rank looks; what one finds all others hear."""
        self.asked, gone = 0, set().union(*self.found.values())
        for rank, pulse in self._pulses.items():
            if rank in self.dead:
                continue
            self.found[rank].update(pulse.feel(set(range(self.ranks)) - {rank} - gone, needs, "waits"))


@given(st.data(), st.sampled_from([2, 3, 5, 8, 20, 100]))
def test_whoever_is_gone_is_found_by_one_that_waits(data, ranks):
    """Also a rank that had said before that it waits; three looks later than others, and one for eight times P."""
    dies = data.draw(st.frozensets(st.integers(0, ranks - 1), max_size=ranks - 1))
    lives = sorted(set(range(ranks)) - dies)
    goes_on = data.draw(st.frozensets(st.sampled_from(lives), min_size=1))
    ring = Ring(ranks, frozenset(), goes_on | data.draw(st.frozensets(st.integers(0, ranks - 1))) & dies)
    for _ in range(data.draw(st.integers(0, 12))):
        ring.look()
    assert not set().union(*ring.found.values())
    ring.dead = dies
    for _ in range(ASKS + 3 + 3 + (ranks > 9) + (ranks > 65)):
        ring.look()
    assert set().union(*ring.found.values()) == dies


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [2, 8, 100, 1000])
def test_questions_of_ranks_that_wait_together_are_few(ranks):
    """Few for each of them from the first look on, whatever their number."""
    ring = Ring(ranks, frozenset(), frozenset(range(ranks)))
    asked = []
    for _ in range(20):
        ring.look(needs=[0])
        asked.append(ring.asked / ranks)
    assert max(asked) <= WIDER + 1
    assert max(asked[4:]) <= 2


def test_one_that_waits_alone_asks_all():
    ring = Ring(100, frozenset(), frozenset({7}))
    asked = []
    for _ in range(6):
        ring.look()
        asked.append(ring.asked)
    assert asked[:2] == [0, 8]
    assert asked[-1] + asked[-2] == 99  # each at every other look, as it was heard of at the one between


def test_a_broken_link_to_a_rank_that_is_needed_is_found():
    """Others who reach that rank say nothing of it; who does not need it does not ask it either."""
    ring = Ring(8, frozenset(), frozenset(range(8)), dark=frozenset({frozenset({1, 5})}))
    for _ in range(ASKS + 2):
        ring.look()
    assert not any(ring.found.values())
    for _ in range(ASKS + 2):
        ring.look(needs=[5])
    assert ring.found == {rank: {5} if rank == 1 else set() for rank in range(8)}


class Raises(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the user's that fails on its rank once it has no more steps."""

    fails = False

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, *arguments):
        if self.fails:
            raise ZeroDivisionError("by hand")
        super().step(*arguments)


def test_a_rank_that_raises_while_it_finishes_is_named_by_all_others():
    """Its engine goes on to answer, so that the others would wait for it without end."""

    def body(comm):
        w = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([w], lr=0.1)
        scheduler = Raises(inner)
        with EagerSGD(inner, [("w", w)], comm=comm, scheduler=scheduler, quorum="solo") as optimizer:
            for _ in range(1 if comm.rank == 1 else 4):
                comm.elapse(1e-3)
                w.grad = torch.ones(2)
                optimizer.step()
            scheduler.fails = comm.rank == 1

    reasons = SimulatedWorld(3).run(lambda comm: caught(body, comm))
    assert reasons[1] == "by hand"
    assert reasons[0] == reasons[2] == "rank 1 gave up its partial allreduce: ZeroDivisionError: by hand"


def caught(body, comm):
    try:
        return body(comm)
    except (CollectiveError, ZeroDivisionError) as error:
        return str(error)
