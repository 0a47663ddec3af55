"""What every transport gets: background calls, time-outs, failing alike, being closed. Ranks are threads here."""

import gc
import math
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from communicators import (
    CollectiveError,
    Payload,
    Round,
    SimulatedWorld,
    allreduce,
    allreduce_async,
    broadcast,
    run,
    start,
)
from communicators.background import control, sends, transport_communicator
from communicators.background import engine as engine_module
from communicators.background.engine import LISTEN_SECONDS, Driven, Engine, engine, leave
from communicators.background.transport import PeerLost, PendingSum, Transport
from communicators.background.transport_communicator import TransportCommunicator
from communicators.timeline import named_messages
from communicators.worlds.gloo_group import GlooGroup, Wait, Waiters
from ranks_on_threads import Network, Threads, ThreadsSignalLine, Waiting, on_all, ranks, soon

pytestmark = pytest.mark.quick


def ping(comm):
    """Each rank's number, one place further."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = yield Round({to: Payload.of(torch.tensor([comm.rank]))}, {source: 8})
    return int(received[source].view(torch.int64))


def test_calls_and_background_calls():
    comms = ranks(3)
    assert on_all(comms, lambda comm: allreduce(torch.ones(5), comm).tolist()) == [[3.0] * 5] * 3
    works = [start(ping(comm), comm, facts="ping") for comm in comms]
    assert [work.wait(timeout=10) for work in works] == [2, 0, 1]


@pytest.mark.parametrize("call", ["run", "start", "wait", "close"])
def test_a_forked_child_is_told_that_a_communicator_is_its_parents(call):
    """It has no engine's thread, so it would wait for ever, and could take the parent's messages."""
    comms = ranks(2)
    pending = start(ping(comms[0]), comms[0], facts="ping")
    calls = {
        "run": lambda: allreduce(torch.ones(1), comms[0]),
        "start": lambda: start(ping(comms[0]), comms[0], facts="ping"),
        "wait": pending.wait,
        "close": comms[0].close,
    }
    if not (child := os.fork()):
        try:
            calls[call]()
        except RuntimeError as error:
            os._exit(0 if "before fork()" in str(error) and engine() is not comms[0].engine else 2)
        os._exit(1)
    end = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert [start(ping(comms[1]), comms[1], facts="ping").wait(timeout=10), pending.wait(timeout=10)] == [0, 1]


def test_a_wait_in_a_callback_says_that_it_would_wait_for_itself():
    comms = ranks(2)
    first = start(ping(comms[0]), comms[0], facts="ping")
    chained = first.get_future().then(lambda _: start(ping(comms[0]), comms[0], facts="again").wait())
    start(ping(comms[1]), comms[1], facts="ping")  # last: the callback of a call that is over runs in this thread
    with pytest.raises(RuntimeError, match="would wait for itself"):
        chained.wait()


@pytest.mark.parametrize("rounds", [(1, 4), (4, 1)])
def test_a_future_of_two_calls_is_over_when_both_are(rounds):
    """Without waiting in the engine's thread, whichever ends last."""

    def pings(comm, times):
        for _ in range(times):
            number = yield from ping(comm)
        return number

    comms = ranks(2)
    comms[0].transport.network.delay = 20e-3
    works = [[start(pings(comm, times), comm, facts=f"{times} pings") for times in rounds] for comm in comms]
    both = [one.get_future(other).then(lambda done, other=other: (done.value(), other.ended)) for one, other in works]
    for number, (future, (one, _)) in enumerate(zip(both, works, strict=True)):
        result, ended = future.wait()
        assert result == 1 - number
        assert ended is not None
        assert one.ended is not None


def test_bytes_and_messages_are_counted_as_in_the_simulated_world():
    """Without the agreement on a new call."""

    def body(comm):
        allreduce(torch.ones(100), comm, native=False)
        return comm.bytes_sent, comm.messages_sent

    assert on_all(ranks(3), body) == SimulatedWorld(3).run(body)


def sums_by(monkeypatch, done, cancel):
    """Transports have a sum of their own. done(transport), cancel(transport): of a sum that is posted."""
    monkeypatch.setattr(Threads, "summed", (torch.float32,))
    post = lambda own, tensor: PendingSum(own, lambda: done(own), lambda: cancel(own))  # noqa: E731
    monkeypatch.setattr(Threads, "post_sum", post)


def test_a_transports_own_sum_counts_what_the_best_algorithms_send(monkeypatch):
    """And the barrier before it: two messages of 16 bytes."""
    sums_by(monkeypatch, done=lambda own: True, cancel=None)
    comms = ranks(3)
    on_all(comms, lambda comm: allreduce(torch.ones(600), comm))
    assert [(comm.bytes_sent, comm.messages_sent) for comm in comms] == [(2 * 16 + 2 * 2400 * 2 // 3, 3)] * 3


def test_a_transports_own_sum_is_given_up_where_its_call_fails(monkeypatch):
    """It uses the tensor until then."""
    posted, given_up = set(), []

    def done(own):
        posted.add(own.rank)
        if len(posted) == 2:
            comms[0].control.request_abort("by hand")
        return False

    sums_by(monkeypatch, done, cancel=lambda own: given_up.append(own.rank))
    comms = ranks(2)
    assert {str(error) for error in on_all(comms, lambda comm: allreduce(torch.ones(3), comm))} == {"by hand"}
    assert sorted(given_up) == [0, 1]


def test_labels_end_and_name_both_ends_of_a_message_alike(monkeypatch):
    """Also labels of a call that fails, and of a message that never comes."""
    begun, ended = [], []

    @contextmanager
    def labelled(name):
        begun.append(name)
        yield
        ended.append(name)

    for name, stand_in in (("labelled", labelled), ("spanning", labelled), ("are_kept", lambda: True)):
        monkeypatch.setattr(transport_communicator, name, stand_in)
    comms = ranks(3)
    on_all(comms, lambda comm: run(ping(comm), comm, facts="ping"))
    told = [event["args"] for event in named_messages({"name": name} for name in begun) if "args" in event]
    sent, came = ({each["key"] for each in told if each["way"] == way} for way in ("to", "from"))
    assert len(told) == 2 * len(sent)
    assert sent == came
    works = [start(late(comm), comm, facts="ping") for comm in comms]
    comms[0].control.request_abort("by hand")
    assert soon(lambda: all(work.is_completed() for work in works))
    assert soon(lambda: sorted(begun) == sorted(ended))


def test_an_exchange_aside_is_among_those_that_it_names():
    comms, pair = ranks(3), [2, 0]
    works = [
        comms[member].aside(ping(SimpleNamespace(rank=place, size=2)), pair, facts="aside")
        for place, member in enumerate(pair)
    ]
    assert [work.wait(timeout=10) for work in works] == [1, 0]


def test_a_wait_that_times_out_names_call_round_and_peer_and_the_call_goes_on():
    comms = ranks(2)
    work = start(ping(comms[0]), comms[0], facts="ping")
    with pytest.raises(TimeoutError, match=r"within 0.05 s: rank 0 waits for rank 1 in call 0, round \d of ping"):
        work.wait(timeout=0.05)
    assert not work.is_completed()
    waiting = threading.Timer(0.05, lambda: run(ping(comms[1]), comms[1], facts="ping"))
    waiting.start()
    assert work.wait(timeout=math.inf) == 1
    waiting.join()


def test_a_schedule_that_never_waits_stops_no_other_call():
    """Nor the end of the process, which waits for the engine's thread."""
    over = threading.Event()

    def polling():
        while not over.is_set():
            yield Round()

    comms = ranks(2)
    works = [start(polling(), comm) for comm in comms]
    try:
        sums = [allreduce_async(torch.ones(3), comm) for comm in comms]
        assert [work.wait(10.0).tolist() for work in sums] == [[2.0] * 3] * 2
    finally:
        over.set()
    for work in works:
        work.wait(10.0)


def test_turns_leave_no_news_where_no_thread_reads_any():
    """As with an MPI that bears one thread alone; they would be kept for ever."""
    comms = ranks(2)
    for comm in comms:
        comm.engine = Engine()
        comm.engine.inline = True
    on_all(comms, lambda comm: run((Round() for _ in range(1000)), comm))
    assert all(comm.engine._news.empty() for comm in comms)


def test_all_who_wait_for_a_call_go_on_when_it_is_over():
    comms = ranks(2)
    work = start(ping(comms[0]), comms[0], facts="ping")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(work.wait, timeout) for timeout in (None, 60.0, None, 60.0)]
        time.sleep(0.05)
        run(ping(comms[1]), comms[1], facts="ping")
        assert [one.result(timeout=10) for one in waiting] == [1] * 4
    assert work.wait(timeout=0.0) == 1


def test_an_error_of_one_transport_is_its_own_communicators_and_the_engine_goes_on():
    broken, sound = ranks(2), ranks(2)
    work = start(ping(broken[0]), broken[0], facts="ping")
    broken[0].transport.read_error = OSError("the cable is out")
    with pytest.raises(CollectiveError, match="rank 0's transport failed: OSError: the cable is out"):
        work.wait(timeout=10)
    with pytest.raises(CollectiveError, match="the cable is out"):
        allreduce(torch.ones(1), broken[0])
    works = [start(ping(comm), comm, facts="ping") for comm in sound]
    assert [work.wait(timeout=10) for work in works] == [1, 0]


def test_a_signal_while_a_rank_waits_ends_the_call_on_all_ranks():
    comms = ranks(3)
    comms[1].transport.nap_error = KeyboardInterrupt()
    schedules = [late(comm) for comm in comms]
    outcomes = on_all(comms[1:] + comms[:1], lambda comm: run(schedules[comm.rank], comm, facts="late"))
    assert isinstance(outcomes[0], KeyboardInterrupt)
    assert {str(outcome) for outcome in outcomes[1:]} == {"rank 1 failed in late: KeyboardInterrupt"}
    assert [schedule.gi_frame for schedule in schedules] == [None] * 3  # ended, also where a traceback holds them
    with pytest.raises(CollectiveError, match="KeyboardInterrupt"):
        allreduce(torch.ones(1), comms[1])


def late(comm):
    """A message that nobody sends."""
    yield Round(recvs={(comm.rank + 1) % comm.size: 64})


def test_a_lost_connection_is_news_until_a_letter_says_why(monkeypatch):
    comms = ranks(2)

    def lost(self):
        raise PeerLost(1, ConnectionError("reset"))

    monkeypatch.setattr(Waiting, "done", lost)
    with pytest.raises(CollectiveError, match="rank 1 is gone: its connection was lost"):
        allreduce(torch.ones(1), comms[0])


def test_a_peer_that_died_is_named_at_once(monkeypatch):
    """mpiexec, which ends the others, leaves no time to wait for a reason."""
    monkeypatch.setattr(transport_communicator, "GRACE_SECONDS", 60.0)
    comms, begin = ranks(2), time.monotonic()

    def died(self):
        raise PeerLost(1, ConnectionError("reset"), died=True)

    monkeypatch.setattr(Waiting, "done", died)
    with pytest.raises(CollectiveError, match="rank 1 is gone: its connection was lost"):
        allreduce(torch.ones(1), comms[0])
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_a_rank_that_has_ended_its_calls_may_leave_while_its_messages_are_in_flight(monkeypatch):
    monkeypatch.setattr(transport_communicator, "GRACE_SECONDS", 0.05)
    comms = ranks(3)
    comms[0].transport.network.delay = 0.6
    for comm in comms:
        comm.timeout = 5.0
    outcomes = on_all(comms, lambda comm: (broadcast(torch.full((3,), comm.rank + 7.0), comm).tolist(), comm.close()))
    assert outcomes == [([7.0] * 3, None)] * 3


def test_closing_after_a_failure_waits_for_what_it_ends():
    comms = ranks(2)
    works = [start(late(comm), comm, facts="late") for comm in comms[:1]]
    comms[0].control.request_abort("by hand")
    assert on_all(comms, lambda comm: comm.close()) == [None, None]
    with pytest.raises(CollectiveError, match="by hand"):
        works[0].wait(timeout=10)


class Broken(Driven):
    """Something for the engine that fails when it is looked at for the third time."""

    def __init__(self, where):
        self.where, self.looks, self.ended = where, 0, threading.Event()
        self.progressed = time.monotonic()

    def advance(self):
        self.look("advance")
        return False

    def watch(self):
        self.look("watch")

    def look(self, where):
        self.looks += where == self.where
        if self.looks == 3:
            raise ZeroDivisionError("by hand")

    def abandon(self, error):
        self.error = error
        self.ended.set()


@pytest.mark.parametrize("where", ["advance", "watch"])
def test_what_fails_when_the_engine_looks_at_it_ends_alone_and_is_told(where):
    broken, comms = Broken(where), ranks(2)
    engine().add(broken)
    works = [start(ping(comm), comm, facts="ping") for comm in comms]
    assert broken.ended.wait(10)
    assert isinstance(broken.error, ZeroDivisionError)
    assert broken.looks == 3
    assert [work.wait(timeout=10) for work in works] == [1, 0]
    assert broken not in engine()._driven


def test_what_is_added_is_looked_at_at_once():
    """The idle engine looks around 20 times a second; fifty in a row take no fifty of its rounds."""
    begin = time.monotonic()
    for _ in range(50):
        broken = Broken("advance")
        engine().add(broken)
        assert broken.ended.wait(10)
    assert time.monotonic() - begin < 50 * LISTEN_SECONDS


def test_who_is_told_is_not_polled(monkeypatch):
    """It is looked at when it is added and when a waiter has news, which ends a nap of minutes."""
    monkeypatch.setattr(engine_module, "WOKEN_SECONDS", 600.0)
    come, over, looks = threading.Event(), threading.Event(), []
    wait = Waiters().begin(Wait(SimpleNamespace(wait=lambda timeout: come.wait(20.0))))

    class Told(Driven):
        woken, progressed = True, time.monotonic()

        def advance(self):
            looks.append(wait.done)
            if wait.done:
                over.set()
            return wait.done

    comms = ranks(2)
    engine().add(Told())
    time.sleep(0.1)
    assert len(looks) < 10  # of polls there would be a hundred
    come.set()
    assert over.wait(10)
    assert on_all(comms, lambda comm: comm.close()) == [None] * 2


def test_a_works_times_are_of_the_communicators_clock():
    comms = ranks(2)
    begin = comms[0].clock()
    works = [start(ping(comm), comm, facts="ping") for comm in comms]
    for work in works:
        work.wait(timeout=10)
        assert begin <= work.began <= work.ended <= comms[0].clock()


def test_a_transport_of_ones_own_is_told_what_it_lacks(monkeypatch):
    """Without a Pending, without a duplicate, and where changed messages go unchecked."""
    monkeypatch.setattr(Threads, "duplicate", Transport.duplicate)
    assert "it lacks duplicate(patience)" in str(on_all(ranks(2), lambda comm: comm.duplicate())[0])
    monkeypatch.setattr(Waiting, "received", lambda self: {p: changed(payload) for p, payload in self.arrivals.items()})
    assert "corrupted agreement" in str(on_all(ranks(2), lambda comm: run(ping(comm), comm))[0])
    monkeypatch.setattr(Threads, "post", lambda *_: None)
    assert "Threads.post() returned None, expected a Pending" in str(on_all(ranks(2), lambda c: run(ping(c), c))[0])


@pytest.mark.parametrize(
    ("where", "method", "given", "says"),
    [
        (Waiting, "done", None, r"Waiting.done\(\) returned None, expected True or False"),
        (Waiting, "received", None, r"Waiting.received\(\) returned None, expected a dict"),
        (Threads, "read_control", None, r"Threads.read_control\(\) returned None, expected a list"),
        (Threads, "read_control", ["text"], r"Threads.read_control\(\) returned \['text'\], expected a list"),
        (Threads, "duplicate", None, r"Threads.duplicate\(\) returned None, expected another Transport"),
        (Threads, "signal_line", None, r"Threads.signal_line\(\) returned None, expected a SignalLine"),
        (ThreadsSignalLine, "sent", None, r"ThreadsSignalLine.sent\(\) returned None, expected True"),
    ],
)
def test_what_a_method_of_ones_own_must_not_return(where, method, given, says, monkeypatch):
    def calls(comm):
        comm.timeout = 5
        run(ping(comm), comm)
        comm.control.listen()
        if comm.failure is None:
            signals = comm.signals()
            signals.send_all(1)
            signals.close()
            signals.check()
        return comm.failure

    monkeypatch.setattr(where, method, lambda *_: given)
    assert re.search(says, str(on_all(ranks(2), calls)[0]))


def test_a_list_of_missing_peers_that_is_none_is_told(monkeypatch):
    monkeypatch.setattr(Waiting, "missing", lambda self: None)
    monkeypatch.setattr(Waiting, "done", lambda self: False)
    with pytest.raises(TypeError, match=r"Waiting.missing\(\) returned None, expected a list"):
        run(ping(comm := ranks(2)[0]), comm)


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [("rank", "0", TypeError), ("rank", 2, ValueError), ("device", "cpu", TypeError), ("threaded", None, TypeError)],
)
def test_a_transport_that_does_not_say_what_it_is(name, given, error):
    transport = Threads(Network(2), 0)
    setattr(transport, name, given)
    with pytest.raises(error, match=rf"Threads.* {name}|Threads.{name} is"):
        TransportCommunicator(transport)
    with pytest.raises(TypeError, match="transport is None, expected a Transport"):
        TransportCommunicator(None)


def test_who_waits_long_for_others_departure_says_for_whom(monkeypatch, caplog):
    monkeypatch.setattr(control, "SAID_SECONDS", 0.01)
    comm = ranks(3)[1]
    comm.timeout = 0.1
    with pytest.raises(TimeoutError):
        comm.close()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 has departed (it closed the communicator), and waits for rank 0, 2 to"
    ]


def changed(payload):
    payload.body.fill_(7)
    return payload


def test_a_call_waits_busily_in_every_round_at_first():
    """Not only in its first: with several rounds, and computation between them, it would nap in all the others."""
    naps = []

    class Polled(Driven):
        polls, progressed = 0, time.monotonic() - 1.0

        def advance(self):
            self.polls += 1
            if self.polls == 2:  # a round is over, and the next one posted
                self.progressed = time.monotonic() + 1e6
            return self.polls > 5

        def watch(self):
            pass

    Engine().drive(Polled(), naps.append)
    assert naps == [pytest.approx(1 / 8, rel=0.1)]  # a second ago there was progress


@pytest.fixture
def receipts(monkeypatch):
    """Sends end only once `come` is set, and those that are given up are in `cancelled`."""
    come, cancelled, received_all = threading.Event(), [], Waiting.done
    monkeypatch.setattr(Waiting, "arrived", received_all)
    monkeypatch.setattr(Waiting, "done", lambda pending: received_all(pending) and come.is_set())
    monkeypatch.setattr(Waiting, "cancel", lambda pending: cancelled.append(pending))
    return SimpleNamespace(come=come, cancelled=cancelled)


def unsent(comms):
    controls = [comm.control for comm in comms]
    return [one for one in list(engine()._driven) if isinstance(one, sends.UnsentMessages) and one.control in controls]


def test_the_thread_of_one_that_retires_drives_nothing(monkeypatch):
    """Where the engine has no thread, as with an MPI that bears one alone, the caller's drives all work."""
    monkeypatch.setattr(transport_communicator, "RETIRE_SECONDS", 0.05)
    drivers, comm = [], ranks(2)[0]

    class Unsent(sends.UnsentMessages):
        def advance(self):
            drivers.append(threading.current_thread())
            return True

    comm.engine = Engine()
    comm.engine.inline = True
    comm.engine.add(Unsent(comm.control, []))
    comm.retire()
    assert soon(lambda: comm.closed)
    assert drivers == []


def test_rounds_and_calls_do_not_wait_for_receipts(receipts):
    """Over TCP they come one α after the message."""
    comms = ranks(4)
    for _ in range(2):
        assert on_all(comms, lambda comm: allreduce(torch.ones(5), comm, native=False).tolist()) == [[4.0] * 5] * 4
    works = [start(ping(comm), comm, facts="ping") for comm in comms]
    assert [work.wait(timeout=10) for work in works] == [3, 0, 1, 2]
    assert len(unsent(comms)) == 12  # of every rank and call
    receipts.come.set()
    assert soon(lambda: not unsent(comms))
    assert not receipts.cancelled


def test_closing_waits_for_receipts(receipts):
    comms = ranks(2)
    assert on_all(comms, lambda comm: run(ping(comm), comm, facts="ping")) == [1, 0]
    with ThreadPoolExecutor(2) as pool:
        closing = [pool.submit(comm.close) for comm in comms]
        time.sleep(0.05)
        assert not any(comm.transport.is_closed for comm in comms)
        receipts.come.set()
        assert [future.result(timeout=10) for future in closing] == [None, None]
    assert all(comm.transport.is_closed for comm in comms)


def test_retiring_waits_a_moment_for_receipts_and_for_nobody(receipts, monkeypatch):
    """The others are told; a rank that has closed its communicator may meet them again, one that has left may not."""
    monkeypatch.setattr(transport_communicator, "RETIRE_SECONDS", 0.05)
    monkeypatch.setattr(sends, "GRACE_SECONDS", 60.0)
    comms = ranks(3)
    on_all(comms, lambda comm: run(ping(comm), comm, facts="ping"))
    comms[0].retire()
    assert soon(lambda: comms[0].transport.is_closed)
    comms[2].control.depart("it exited")
    assert soon(lambda: set(comms[1].control.departed) == {0, 2})
    assert comms[1].ended == comms[1].gone == {2}
    receipts.come.set()


def test_what_a_failed_communicator_has_left_behind_is_given_up(receipts):
    comms = ranks(2)
    on_all(comms, lambda comm: run(ping(comm), comm, facts="ping"))
    comms[0].control.request_abort("by hand")
    assert soon(lambda: not unsent(comms))
    assert len(receipts.cancelled) >= 2


def test_receipts_of_a_peer_that_has_left_or_is_lost_do_not_come(receipts, monkeypatch):
    monkeypatch.setattr(sends, "GRACE_SECONDS", 0.05)
    comms = ranks(2)
    on_all(comms, lambda comm: run(ping(comm), comm, facts="ping"))
    monkeypatch.setattr(Waiting, "missing", lambda pending: list(pending.action.sends))
    comms[1].control.depart("it exited")
    assert soon(lambda: [one.control for one in unsent(comms)] == [comms[1].control])

    def lost(pending):
        raise PeerLost(0, ConnectionError("reset"))

    monkeypatch.setattr(Waiting, "done", lost)
    assert soon(lambda: not unsent(comms))
    assert len(receipts.cancelled) >= 2


def test_without_threads_a_call_waits_for_receipts(receipts, monkeypatch):
    monkeypatch.setattr(Threads, "threaded", False)
    monkeypatch.setattr(transport_communicator, "engine", Engine)
    comms = ranks(2)
    threading.Timer(0.1, receipts.come.set).start()
    assert on_all(comms, lambda comm: (run(ping(comm), comm, facts="ping"), receipts.come.is_set())) == [
        (1, True),
        (0, True),
    ]


def test_without_threads_a_call_drives_what_was_started_before(monkeypatch):
    """Rank 0 makes its second call before it waits for the first, rank 1 the other way round."""
    monkeypatch.setattr(Threads, "threaded", False)
    monkeypatch.setattr(transport_communicator, "engine", Engine)  # each rank is a process
    comms = ranks(2)

    def body(comm):
        work = start(ping(comm), comm, facts="ping")
        if comm.rank == 0:
            return [run(ping(comm), comm, facts="pong", timeout=5), work.wait(timeout=5)]
        return [work.wait(timeout=5), run(ping(comm), comm, facts="pong", timeout=5)]

    assert on_all(comms, body) == [[1, 1], [0, 0]]


def test_closing_is_collective_and_releases_the_transport():
    comms = ranks(3)
    assert on_all(comms, lambda comm: allreduce(torch.ones(1), comm).item()) == [3.0] * 3
    assert on_all(comms, lambda comm: comm.close()) == [None] * 3
    assert all(comm.transport.is_closed for comm in comms)
    assert on_all(comms, lambda comm: comm.close()) == [None] * 3  # again: nothing
    with pytest.raises(CollectiveError, match="this communicator is closed"):
        allreduce(torch.ones(1), comms[0])


@pytest.mark.slow
def test_closing_too_early_or_alone_is_told(monkeypatch):
    monkeypatch.setattr(control, "ABORT_SECONDS", 0.1)  # of an arbiter that has left
    comms = ranks(2)
    work = start(ping(comms[0]), comms[0], facts="ping")
    with pytest.raises(RuntimeError, match=r"close\(\) while calls that were started are in flight"):
        comms[0].close()
    assert run(ping(comms[1]), comms[1], facts="ping") == 0
    assert work.wait(timeout=10) == 1
    comms[0].timeout = 0.05
    with pytest.raises(TimeoutError, match=r"rank 0 closed its communicator, but ranks \[1\] did not"):
        comms[0].close()
    with pytest.raises(CollectiveError, match=r"rank 0 left \(it closed the communicator\) while rank 1 waits"):
        run(ping(comms[1]), comms[1], facts="ping")


@pytest.mark.slow
def test_a_communicator_that_nobody_holds_is_released():
    comms = ranks(2)
    works = [start(ping(comm), comm, facts="ping") for comm in comms]
    assert [work.wait(timeout=10) for work in works] == [1, 0]
    gone = [weakref.ref(comm) for comm in comms]
    del comms, works
    for _ in range(100):  # the engine's thread may just be looking at one
        gc.collect()
        if not any(ref() for ref in gone):
            break
        time.sleep(0.01)
    assert [ref() for ref in gone] == [None, None]


def test_a_group_that_ends_does_not_wait_long_for_a_message_that_never_comes():
    come = threading.Event()
    waiters = Waiters()
    wait = waiters.begin(Wait(SimpleNamespace(wait=lambda timeout: come.wait(5.0))))
    waiters.close(timeout=0.05)
    assert not wait.done
    come.set()


def test_a_work_that_is_over_is_let_go_before_its_waiter_is_idle():
    """To free one of torch's at the interpreter's end, in a thread, aborts the process."""

    class Work:
        def wait(self, timeout):
            return True

    waiters, work = Waiters(), Work()
    alive, wait = weakref.ref(work), waiters.begin(Wait(work))
    del work
    waiters.close(timeout=5.0)
    assert wait.done
    assert alive() is None
    assert not any(thread.is_alive() for thread in waiters._threads)


@pytest.mark.slow
def test_a_group_that_ends_while_messages_come_leaves_no_thread():
    """But where gloo lost a send: closing the connection, it forgets one that it had begun to write."""
    for number in range(60):
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(lambda rank, store=store: GlooGroup(store, rank, 2), range(2)))
            for rank, group in enumerate(groups):
                group.post("recv", torch.empty(8), 1 - rank, 5)

            def end(rank, groups=groups, number=number):
                send = groups[rank].post("send", torch.empty(8), 1 - rank, 5)
                time.sleep(rank * number * 2e-5)
                groups[rank].end(timeout=5.0)
                return send

            lost = sum(not send.done for send in pool.map(end, range(2)))
        assert sum(thread.is_alive() for group in groups for thread in group.waiters._threads) == lost


def test_a_forked_child_does_not_depart(monkeypatch):
    made = Engine()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    made.close()
    assert not made._closing


def test_leaving_ends_the_communicators_that_there_are_and_no_later_ones():
    leave(timeout=0.2)  # those of tests before, which may have left a peer that does not answer
    comms = ranks(2)
    on_all(comms, lambda comm: allreduce(torch.ones(1), comm))
    assert leave(timeout=10.0) == []
    assert all(comm.transport.is_closed for comm in comms)
    later = ranks(2)
    works = [start(ping(comm), comm, facts="ping") for comm in later]
    assert [work.wait(timeout=10) for work in works] == [1, 0]


def test_leaving_names_who_does_not_answer():
    comms = ranks(3)
    comms[1].transport.read_error = comms[2].transport.read_error = ConnectionError("dark")
    assert set(leave(timeout=0.2)) >= {1, 2}
