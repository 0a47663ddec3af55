"""A rank that is merely slow is no error, however long it takes; one that does not answer is, within the time-out."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from partial_collectives import EagerSGD, PartialAllreduce
from partial_collectives.pulse import ASKS, HEARD, Pulse
from ranks_on_threads import on_all, ranks

HOURS = 7200.0
"""Many time-outs."""


def slow_everywhere(comm, quorum):
    """Rank 1 takes hours for a step, before a meeting, before the end, and before it closes."""
    slow, got = comm.rank == 1, 0.0

    def computes():
        comm.elapse(HOURS if slow else 1e-3)

    partial = PartialAllreduce(torch.zeros(1), comm, quorum=quorum, max_staleness=1)
    for _ in range(3):
        computes()
        got += sum(result.total.item() for result in partial.allreduce(torch.ones(1)))
    computes()
    got += sum(result.total.item() for result in partial.synchronize())
    computes()
    got += sum(result.total.item() for result in partial.finish())
    computes()
    partial.close()
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


def test_who_waits_for_longer_than_the_time_out_says_so_and_goes_on(warning):
    """Real time: the slow rank computes until the others have waited for longer than their time-out."""
    comms = ranks(3)

    def body(comm):
        comm.timeout = 1.0
        with PartialAllreduce(torch.zeros(1), comm, quorum="solo", max_staleness=0) as partial:
            if comm.rank == 1:
                assert warning.event.wait(30)
            (result,) = partial.allreduce(torch.ones(1))
        return result.total.item()

    assert on_all(comms, body) == [3.0] * 3
    assert "in partial round 0 for" in warning.said
    assert "all ranks live" in warning.said


def test_a_rank_that_does_not_answer_is_named_by_all_others():
    """As a stopped process is: neither it nor its engine takes anything."""
    comms, stopped = ranks(3), threading.Event()

    def body(comm):
        comm.timeout = 1.0
        partial = PartialAllreduce(torch.zeros(1), comm, quorum=3)
        if comm.rank == 1:
            line = partial._rounds._signals._comm.transport.line
            line.received = list
            assert stopped.wait(30)
            return None
        try:
            partial.allreduce(torch.ones(1))
        except CollectiveError as error:
            return str(error)
        finally:
            stopped.set()

    said = on_all(comms, body)
    expected = "rank 1 has not answered for 1 s, not even in the background: its process is stopped, or cannot be"
    assert said[0] == said[2]
    assert said[0].startswith(expected)


@given(st.lists(st.sampled_from(["feels", "answers"]), max_size=60))
def test_a_pulse(events):
    """In vain once ASKS questions in a row had no answer, the first of them one look after the last sign of life."""
    asked, answered, unanswered = [], {1}, HEARD
    pulse = Pulse(9.0, asked.append, answered)
    for event in events:
        if event == "answers":
            answered.add(1)
            unanswered = HEARD
        else:
            asked.clear()
            silent = pulse.feel([1], "rank 0 waits")
            assert silent == ([1] if unanswered >= ASKS else [])
            if silent:
                assert pulse.silence(1).startswith("rank 1 has not answered for 9 s")
                return
            unanswered += 1
            assert asked == [1] * (unanswered > 0)


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
