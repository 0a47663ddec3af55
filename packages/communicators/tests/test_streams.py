"""What background calls on a GPU rest on, as far as it can be seen without one."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from communicators import Payload, Round, start
from communicators.background.call import Call
from communicators.background.control import Control
from communicators.background.streams import SideStreams, given
from communicators.background.transport_communicator import OutstandingCall
from communicators.errors import CollectiveError
from communicators.schedules.dense import ring_allreduce
from ranks_on_threads import on_all, ranks

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def outer(inner, extra):
    result = yield from inner
    return result + extra


def test_what_a_schedule_was_given_is_found_inside_schedules_too():
    x, extra = torch.ones(3), torch.zeros(3)
    held = given(outer(ring_allreduce(x, 0, 2), extra))
    assert sum(value is x for value in held) == 1
    assert sum(value is extra for value in held) == 1
    assert given(iter([])) == []


@pytest.mark.slow
def test_what_was_given_lives_on_when_the_schedule_is_through():
    def lets_go(x):
        del x
        yield Round()

    x = torch.ones(3)
    alive, schedule = weakref.ref(x), lets_go(x)
    held = given(schedule)
    assert len(list(schedule)) == 1
    del x, schedule
    gc.collect()
    assert alive() is not None
    held.clear()
    gc.collect()
    assert alive() is None


def test_on_a_cpu_there_are_no_streams():
    works = on_all(ranks(2), lambda comm: start(ring_allreduce(torch.ones(3), comm.rank, 2), comm, device=CPU))
    assert [work.side for work in works] == [None, None]
    assert [work.wait().tolist() for work in works] == [[2.0] * 3] * 2


class Slow:
    """A side stream that becomes idle when it is told to."""

    def __init__(self):
        self.idle, self.asked = threading.Event(), threading.Event()

    def current(self):
        return contextlib.nullcontext()

    def is_idle(self):
        self.asked.set()
        return self.idle.is_set()


class Comm:
    """As much of a communicator, and of its transport, as a call without messages asks for."""

    rank, size, untagged = 0, 2, None

    def __init__(self):
        self.transport, self.control, self.said = self, Control(self), []
        self.engine = SimpleNamespace(inline=False)

    def send_control(self, peer, message):
        self.said.append(message)


def outstanding_of(comm, schedule, facts):
    return OutstandingCall(comm, Call(schedule, rank=0, size=2, facts=facts, number=0), 1.0, CPU, comm.control)


def test_a_call_is_over_when_its_stream_is_idle():
    def result():
        return 7
        yield

    outstanding, side = outstanding_of(Comm(), result(), "nothing"), Slow()
    outstanding.side = side
    assert not outstanding.advance()
    assert not outstanding.advance()
    assert side.asked.is_set()
    assert not outstanding.is_completed()
    side.idle.set()
    assert outstanding.advance()
    assert outstanding.result() == 7


def test_a_stream_that_fails_fails_the_call():
    class Broken(Slow):
        def current(self):
            raise RuntimeError("device-side assert")

    comm = Comm()
    outstanding = outstanding_of(comm, iter([]), "sum")
    outstanding.call.close = lambda: None
    outstanding.side = Broken()
    assert outstanding.advance()
    assert comm.control.abort_reason == "rank 0 failed in sum: RuntimeError: device-side assert"
    assert len(comm.said) == 1
    with pytest.raises(CollectiveError, match="device-side assert"):
        outstanding.result()


def stamped(call, sender, numel=3):
    payload = Payload.of(torch.ones(numel))
    Call(iter(()), rank=sender, size=2, facts=call.facts, number=call.number).stamp(payload)
    return payload


def test_a_message_of_another_call_that_was_not_read_shows_at_the_end():
    def call(number=4):
        return Call(iter(()), rank=0, size=2, facts="sum", number=number)

    good, bad = call(), call()
    for _ in range(2):
        good.accept_unread(1, stamped(good, 1))
        good.settle()
    bad.accept_unread(1, stamped(bad, 1))
    bad.accept_unread(1, stamped(call(5), 1))
    with pytest.raises(CollectiveError, match="rank 0 got a message of another call in sum"):
        bad.settle()


class Stream:
    """In place of torch.cuda.Stream."""

    def __init__(self, device=None):
        self.busy, self.behind = True, []

    def wait_stream(self, other):
        self.behind.append(other)

    def query(self):
        return not self.busy


def test_a_stream_begins_behind_the_callers_and_is_used_again_when_it_is_idle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    gpu, streams = torch.device("cuda", 0), SideStreams()
    one, other = (streams.beside(ring_allreduce(torch.ones(3), 0, 2), gpu) for _ in range(2))
    assert one._stream is not other._stream
    assert one._stream.behind == ["the caller's"]
    assert not one.is_idle()
    one._stream.busy = False
    assert one.is_idle()
    again = streams.beside(ring_allreduce(torch.ones(3), 0, 2), gpu)
    assert again._stream is one._stream
    assert again._stream.behind == ["the caller's"] * 2
