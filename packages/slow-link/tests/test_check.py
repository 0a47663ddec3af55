"""The self-check: its model is the simulated clock's, and it prints every measurement once."""

import json
import threading
from functools import partial

import pytest
import torch
from communicators import SLOT_BYTES, Link, Payload, Round, SimulatedWorld, allreduce, barrier, run
from slow_link import Launcher, measure
from slow_link.check import Row, _line, cost, good, modelled, seconds_per_launch, short_repeats
from slow_link.measure import PING_BYTES, SUM_BYTES, BareCalls, Found
from slow_link.throttled import Throttled

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["ping-pong", "allreduce"])
def test_the_model_has_the_messages_and_bytes_of_the_simulated_clock(kind, ranks):
    """One way of a ping-pong; powers of two sum so many by halving and doubling. Our headers are not in the model."""
    numel = 1 << 13

    def seconds(link):
        def body(comm):
            if kind == "allreduce":
                allreduce(torch.ones(numel), comm, native=False)
            else:
                measure._our_ping_pong(comm, SLOT_BYTES + 4 * numel)
            return comm.clock() / (1 if kind == "allreduce" else 2)

        return max(SimulatedWorld(ranks, link).run(body))

    messages, nbytes = cost(kind, 4 * numel, ranks)
    assert seconds(Link(1.0, 0.0)) == pytest.approx(messages)
    assert seconds(Link(0.0, 1e-6)) == pytest.approx(1e-6 * (nbytes + messages * SLOT_BYTES))


@pytest.mark.parametrize(("ratio", "fits"), [(1.0, True), (1.14, True), (0.86, True), (1.16, False), (0.84, False)])
def test_a_row_beyond_the_tolerance_is_marked(ratio, fits):
    row = Row(2, Found("gloo", "ping-pong", 1 << 16, [0.1 * ratio + 0.02] * 5), model=0.1, software=0.02)
    assert good([row]) == fits == (not _line(row).endswith("!"))


@pytest.mark.parametrize(("mbit", "milliseconds"), [(100, 0.0), (100, 1.0), (10, 50.0), (0.1, 3e3)])
def test_a_launch_has_time_for_all_that_it_measures(mbit, milliseconds):
    """And of short ping-pongs there are fewer on a link on which they take long."""
    link, repeats = Launcher(ranks=4, mbit_per_second=mbit, milliseconds=milliseconds), 15
    short = short_repeats(link, repeats)
    assert (short == 20 * repeats) == (milliseconds <= 1)
    times = {nbytes: short if nbytes == PING_BYTES[0] else repeats for nbytes in PING_BYTES}
    once = sum(2 * times[nbytes] * modelled("ping-pong", nbytes, link) for nbytes in PING_BYTES)
    assert seconds_per_launch(link, repeats) > 2 * (once + repeats * modelled("allreduce", SUM_BYTES, link)) + 60


@pytest.mark.parametrize(("rank", "serves"), [(0, True), (1, False), (2, True)])
def test_the_rank_serves_whose_clock_counts(rank, serves):
    """Who receives first may come late, find the ball there, and take its way for shorter than it was."""
    calls = []
    names = ("send", "receive")
    play = {name: lambda *given, name=name: calls.append(name) for name in names}
    measure._ping_pong(BareCalls("bare", **play, allreduce=None, barrier=None, end=None), rank, 8)
    assert calls == list(names if serves else reversed(names))
    assert bool(next(measure._rally(rank, SLOT_BYTES)).sends) == serves


def bare_calls(comm):
    """The calls of MPI or gloo, by a simulated rank."""

    def once(**exchange):
        yield Round(**exchange)

    return BareCalls(
        name="bare",
        send=lambda ball, peer: run(once(sends={peer: Payload.of(ball)}), comm),
        receive=lambda ball, peer: run(once(recvs={peer: ball.nbytes}), comm),
        allreduce=lambda x: allreduce(x, comm, native=False),
        barrier=partial(barrier, comm),
        end=lambda: None,
    )


@pytest.mark.parametrize("slow", [None, Link(1e-4, 0.0)])
def test_rank_0_prints_every_measurement_with_all_repeats(slow, monkeypatch, capsys):
    """Behind a throttled link only those that it slows."""
    own = threading.local()
    monkeypatch.setattr(measure, "over_gloo", lambda: own.bare)
    monkeypatch.setattr(measure, "behind_link", lambda: own.comm)

    def body(comm):
        own.bare, own.comm = bare_calls(comm), comm if slow is None else Throttled(comm, slow)
        measure.main("gloo", 2, 40)

    SimulatedWorld(4).run(body)
    found = [Found(*json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    every = ["communicators, gloo"] if slow else ["bare", "communicators, gloo"]
    expected = [(who, "ping-pong", n, 40 if n == PING_BYTES[0] else 2) for who in every for n in PING_BYTES]
    expected += [(who, "allreduce", SUM_BYTES, 2) for who in every]
    assert [(*one[:3], len(one.seconds)) for one in found] == expected
    assert min(min(one.seconds) for one in found) > (slow.alpha if slow else 0.0)
