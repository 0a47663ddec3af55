"""Signals between ranks: what was sent before close() comes, on every living rank, in every world."""

from __future__ import annotations

import random
import time
from enum import IntEnum

import pytest
import torch
from communicators import CollectiveError, Elapse, Link, SimulatedWorld, allreduce, start, testing
from communicators.background import transport_communicator
from communicators.background.engine import Engine, engine
from communicators.background.signals import MOST_UNREAD, MOST_VALUES, TransportSignals, _packed, _unpacked
from communicators.background.transport import SIGNAL_BYTES, PeerLost
from communicators.signals import MOST_WAITING
from communicators.worlds.alone import Alone
from hypothesis import given
from hypothesis import strategies as st
from ranks_on_threads import Threads, on_all, ranks, soon

pytestmark = pytest.mark.quick


@st.composite
def plans(draw, sizes):
    """(size, for each rank what it does before it closes): signals to one, to all, polls and computation."""
    size = draw(sizes)
    act = st.one_of(
        st.tuples(st.just("send"), st.integers(0, size - 1), st.integers(0, 3)),
        st.tuples(st.just("send_all"), st.integers(0, 3)),
        st.just(("poll",)),
        st.just(("elapse",)),
    )
    return size, [draw(st.lists(act, max_size=8)) for _ in range(size)]


def expected(size, plan):
    """For each rank what comes to it, as a set of (source, value)."""
    coming = [set() for _ in range(size)]
    for source, acts in enumerate(plan):
        for act in acts:
            if act[0] == "send":
                coming[act[1]].add((source, act[2]))
            elif act[0] == "send_all":
                for target in set(range(size)) - {source}:
                    coming[target].add((source, act[1]))
    return coming


def carry_out(comm, acts):
    """What comes to a rank that acts so, polled to the end."""
    signals, got = comm.signals(), []
    for name, *arguments in acts:
        if name == "poll":
            got += signals.poll()
        elif name == "elapse":
            comm.elapse(1e-4)
        else:
            getattr(signals, name)(*arguments)
    signals.close()
    return set(got + signals.poll())


@given(plan=plans(testing.world_sizes(most=8)), seed=st.integers(0, 99), jitter=st.sampled_from([0.0, 1e-3]))
def test_every_signal_comes_simulated(plan, seed, jitter):
    size, acts = plan
    world = SimulatedWorld(size, seed=seed, jitter=jitter)
    assert world.run(lambda comm: carry_out(comm, acts[comm.rank])) == expected(size, acts)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(8))
def test_closing_waits_for_signals_that_are_slower_than_its_own_messages(seed):
    acts = [("send_all", 1), ("send_all", 2)]
    world = SimulatedWorld(2, Link(1e-6, 0.0), seed=seed, jitter=1.0)
    assert world.run(lambda comm: carry_out(comm, acts)) == expected(2, [acts] * 2)


@pytest.mark.parametrize("seed", range(4))
def test_every_signal_comes_over_a_transport(seed):
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4])
    sends = [[("send", draw.randrange(size), draw.randrange(200)) for _ in range(150)] for _ in range(size)]
    acts = [[*draw.sample([*some, ("poll",), ("send_all", -1)], len(some) + 2)] for some in sends]
    comms = ranks(size)
    assert on_all(comms, lambda comm: carry_out(comm, acts[comm.rank])) == expected(size, acts)
    assert on_all(comms, lambda comm: allreduce(torch.ones(1), comm).item()) == [size] * size


def test_a_simulated_signal_takes_the_links_time_and_they_keep_their_order():
    def body(comm):
        heard = []
        signals = comm.signals(lambda source, value: heard.append((comm.clock(), source, value)))
        start = comm.clock()
        if comm.rank == 0:
            for value in (5, 3, 4):
                signals.send(1, value)
        comm.elapse(3.0)
        signals.close()
        return [(round(at - start, 6), source, value) for at, source, value in heard]

    assert SimulatedWorld(2, Link(0.5, 0.125)).run(body)[1] == [(1.5, 0, 5), (1.5, 0, 3), (1.5, 0, 4)]
    in_order = SimulatedWorld(2, Link(1e-3, 0.0), seed=3, jitter=0.5).run(body)[1]
    assert [value for _, _, value in in_order] == [5, 3, 4]


def answering(comm):
    """Rank 0 asks all, who answer from on_signal; nobody polls."""
    answers = []
    signals = comm.signals(lambda source, value: signals.send(0, value + 1) if comm.rank else answers.append(source))
    if comm.rank == 0:
        signals.send_all(7)
        assert until(comm, lambda: len(answers) == comm.size - 1)
    allreduce(torch.ones(1), comm)
    signals.close()
    return sorted(answers)


def until(comm, condition):
    """In virtual time, or while the engine's thread goes on."""
    for _ in range(1000):
        if condition():
            return True
        comm.elapse(1e-4)
    return soon(condition)


def test_on_signal_may_signal():
    expected = [[1, 2, 3], [], [], []]
    assert SimulatedWorld(4).run(answering) == expected
    assert on_all(ranks(4), answering) == expected


def test_a_signal_to_itself_and_alone():
    for comm in (Alone(), *ranks(1)):
        signals = comm.signals()
        signals.send(0, 3)
        signals.send_all(4)
        signals.close()
        assert signals.poll() == [(0, 3)]
        assert signals.departed == frozenset()
        with pytest.raises(CollectiveError, match="these signals are closed"):
            signals.send(0, 3)


def closed_ones(comm):
    signals = comm.signals()
    signals.send_all(1)
    signals.close()
    signals.close()
    assert len(signals.poll()) == comm.size - 1
    assert signals.poll() == []
    with pytest.raises(CollectiveError, match="these signals are closed"):
        signals.send_all(1)


def test_after_closing():
    SimulatedWorld(3).run(closed_ones)
    assert on_all(ranks(3), closed_ones) == [None] * 3


@pytest.mark.parametrize(
    ("peer", "value", "said"),
    [(2, 0, "cannot signal rank 2 of 2"), (True, 0, "cannot"), (0, 1 << 63, "64 bits"), (0, 1.0, "64 bits")],
)
def test_what_is_no_signal(peer, value, said):
    def body(comm):
        signals = comm.signals()
        with pytest.raises(ValueError, match=said):
            signals.send(peer, value)
        signals.close()

    SimulatedWorld(2).run(body)


def flooding(comm):
    """Rank 0 sends more than rank 1, which never polls, can hold."""
    signals, refused = comm.signals(), False
    if comm.rank == 0:
        for value in range(2 * (MOST_WAITING + MOST_UNREAD)):
            try:
                signals.send(1, value)
            except RuntimeError as error:
                refused = "rank 1 has not taken 1024 signals" in str(error)
                break
    signals.close()
    return refused, len(signals.poll()) > 0


def test_signals_that_nobody_takes_are_bounded():
    assert SimulatedWorld(2).run(flooding) == [(True, False), (False, True)]
    assert on_all(ranks(2), flooding) == [(True, False), (False, True)]


def test_the_same_signal_many_times_needs_no_room():
    def body(comm):
        signals = comm.signals()
        for _ in range(10 * MOST_WAITING):
            signals.send_all(1)
        signals.close()
        return signals.poll()

    assert SimulatedWorld(2).run(body) == [[(1, 1)], [(0, 1)]]


def raising(comm):
    def on_signal(source, value):
        raise ZeroDivisionError("by hand")

    signals = comm.signals(on_signal if comm.rank == 1 else None)
    if comm.rank == 0:
        signals.send(1, 1)

    def failed():
        try:
            signals.send(2, 1)
        except CollectiveError as error:
            return str(error)
        return ""

    assert until(comm, failed)
    signals.close()
    assert allreduce(torch.ones(1), comm).item() == comm.size
    return failed()


def test_what_on_signal_raises_fails_the_signals_on_all_ranks_and_nothing_else():
    reason = "rank 1 failed in its signals: ZeroDivisionError: by hand"
    assert SimulatedWorld(3).run(raising) == [reason] * 3
    assert on_all(ranks(3), raising) == [reason] * 3


def test_waiting_in_on_signal_is_refused():
    def body(comm, wait):
        def on_signal(source, value):
            wait(comm, signals)

        signals = comm.signals(on_signal)
        signals.send(0, 1)
        assert until(comm, lambda: failure_of(signals))
        return failure_of(signals)

    for wait in (lambda comm, signals: signals.close(), lambda comm, signals: signals.poll()):
        for got in (*SimulatedWorld(1).run(lambda c, wait=wait: body(c, wait)), body(ranks(1)[0], wait)):
            assert "RuntimeError" in got
            assert "on_signal" in got


def failure_of(signals):
    try:
        signals.send(0, 1)
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_who_does_not_close_is_named_and_the_others_fail():
    def body(comm):
        signals = comm.signals()
        comm.timeout = 0.2
        if comm.rank == 1:
            assert until(comm, lambda: failure_of(signals))
            return failure_of(signals)
        signals._comm.timeout = 0.2
        with pytest.raises(TimeoutError, match=r"rank 0 closes its signals, but ranks \[1\] do not"):
            signals.close()
        return None

    comms = ranks(2)
    assert "timed out after 0.2 s: rank 0 closes its signals" in on_all(comms, body)[1]


@pytest.mark.slow
def test_a_peer_that_has_departed_is_not_waited_for():
    comms = ranks(3)
    made = on_all(comms, lambda comm: comm.signals())
    made[2]._comm.control.depart("it exited")
    assert soon(lambda: made[0].departed == made[1].departed == {2})
    for one in made[:2]:
        one.send(2, 1)
        one.send_all(2)
    on_all(made[:2], lambda one: one.close())
    assert [one.poll() for one in made[:2]] == [[(1, 2)], [(0, 2)]]
    made[2].close()
    assert made[2].poll() == []


def test_a_failed_communicators_signals_go_on_and_it_makes_no_new_ones():
    comms = ranks(2)
    made = on_all(comms, lambda comm: comm.signals())
    comms[0].control.request_abort("by hand")
    assert soon(lambda: comms[1].control.abort_reason)
    with pytest.raises(CollectiveError, match="by hand"):
        comms[0].signals()
    made[0].send(1, 5)
    on_all(made, lambda one: one.close())
    assert made[1].poll() == [(0, 5)]


def test_closing_frees_all_that_they_hold():
    comms = ranks(2)
    for _ in range(3):
        made = on_all(comms, lambda comm: comm.signals())
        assert sum(isinstance(one, TransportSignals) for one in engine()._driven) >= 2
        on_all(made, lambda one: one.close())
        assert all(one._comm.transport.is_closed and one._comm.transport.line.is_closed for one in made)
        assert not [one for one in engine()._driven if one in made]


def test_those_that_are_open_when_the_process_ends_free_what_they_hold(monkeypatch):
    own = Engine()
    monkeypatch.setattr(transport_communicator, "engine", lambda: own)
    made = on_all(ranks(2), lambda comm: comm.signals())
    own.close()
    assert all(one._comm.transport.is_closed and one._comm.transport.line.is_closed for one in made)


def test_without_a_thread_they_are_refused(monkeypatch):
    monkeypatch.setattr(Threads, "threaded", False)
    monkeypatch.setattr(transport_communicator, "engine", Engine)
    with pytest.raises(RuntimeError, match="THREAD_MULTIPLE: it is mpi4py's default"):
        ranks(2)[0].signals()


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=MOST_VALUES), st.booleans(), st.integers(0, 1 << 16))
def test_a_message_holds_what_was_sent_and_a_changed_bit_is_noticed(values, last, flip):
    message = _packed(values, last)
    assert len(message) <= SIGNAL_BYTES
    assert _unpacked(message.ljust(SIGNAL_BYTES, b"\0"), 0) == (tuple(values), last)
    changed = bytearray(message)
    changed[flip // 8 % len(changed)] ^= 1 << flip % 8
    with pytest.raises(CollectiveError, match="corrupted signal"):
        _unpacked(bytes(changed), 0)


def test_a_lost_connection_departs(monkeypatch):
    comms = ranks(2)
    made = on_all(comms, lambda comm: comm.signals())

    def sent(peer):
        raise PeerLost(peer, ConnectionError("reset"))

    made[0]._comm.transport.line.sent = sent
    made[0].send(1, 1)
    assert soon(lambda: made[0].departed == {1})
    made[0].send(1, 2)
    made[1]._comm.control.lose(0)
    assert on_all(made, lambda one: one.close()) == [None, None]


def test_a_rank_waits_until_signals_bring_something_about_and_reminds_itself():
    def body(comm):
        heard = []
        signals = comm.signals(lambda source, value: heard.append((source, value)))
        if comm.rank == 0:
            comm.elapse(1e-3)
            signals.send_all(7)
        signals.wait_until(lambda: comm.rank == 0 or (0, 7) in heard, 10.0)
        signals.remind(0.02, 9)
        begin = comm.clock()
        signals.wait_until(lambda: (comm.rank, 9) in heard, 10.0)
        assert comm.clock() - begin >= 0.0199
        signals.close()

    SimulatedWorld(3).run(body)
    assert on_all(ranks(3), body) == [None] * 3


def test_who_waits_in_vain():
    def body(comm):
        signals = comm.signals(lambda source, value: None)
        if comm.rank == 0:
            signals.wait_until(lambda: False, 0.2)
        signals.close()

    with pytest.raises(CollectiveError, match="deadlock: rank 0 waits for a signal"):
        SimulatedWorld(2).run(body)
    signals = Alone().signals(lambda source, value: None)
    with pytest.raises(TimeoutError, match="nobody else"):
        signals.wait_until(lambda: False, 0.1)


def test_who_waits_is_told_at_once_that_the_signals_have_failed():
    def body(comm):
        signals, began = comm.signals(lambda source, value: None), time.monotonic()
        if comm.rank == 1:
            time.sleep(0.3)
            signals.fail("enough")
        else:
            with pytest.raises(CollectiveError, match="enough"):
                signals.wait_until(lambda: False, 30.0)
        return time.monotonic() - began

    assert max(on_all(ranks(2), body)) < 10


def test_who_begins_to_wait_is_not_kept_waiting_by_naps_that_grew_while_nothing_came():
    def naps(comm):
        signals = comm.signals(lambda source, value: None)
        seen = []
        signals.progressed = 0.0  # nothing has come for long

        def over():
            seen.append(time.monotonic() - signals.progressed)
            return True

        signals.wait_until(over, 1.0)
        signals.close()
        return seen[0]

    assert max(on_all(ranks(2), naps)) < 60  # seconds of a clock that began long ago, or a moment


def test_signals_from_within_a_schedule():
    """Where nothing else happens in the world."""

    def says(signals, rank):
        yield Elapse(1e-3)
        signals.send(rank, 5)

    def body(comm):
        heard = []
        signals = comm.signals(lambda source, value: heard.append(value))
        work = start(says(signals, comm.rank), comm, facts="says")
        signals.wait_until(lambda: bool(heard), 5.0)
        work.wait()
        signals.close()
        return comm.clock()

    assert max(SimulatedWorld(2).run(body)) < 1.0


class Letter(IntEnum):
    A = 1


def test_a_value_of_an_enumeration():
    signals = Alone().signals()
    signals.send(0, Letter.A)
    assert signals.poll() == [(0, 1)]
