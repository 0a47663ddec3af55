"""Agreement on facts, and how ranks come to one reason: pure parts, without any transport."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from communicators import CollectiveError, SimulatedWorld, run, testing
from communicators.background.agreement import FACTS_BYTES, agreement
from communicators.background.control import REMEMBERED_CALLS, Control, RequestedAbort
from communicators.background.engine import LISTEN_SECONDS
from communicators.background.transport import CONTROL_BYTES
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick


class Sender:
    """Transport as far as a control writes to it: `sent` holds (peer, message)."""

    def __init__(self, rank, size, send=None):
        self.rank, self.size, self.sent = rank, size, []
        self.send_control = send or (lambda *message: self.sent.append(message))


class Network:
    """Carries control messages between controls, in any order that `choose` picks among the pairs of ranks."""

    def __init__(self, size, choose):
        self.choose, self.queues = choose, {}
        self.controls = [Control(Sender(rank, size, partial(self.send, rank))) for rank in range(size)]
        self.dead = None  # a pair of ranks

    def send(self, source, target, message):
        assert len(message) <= CONTROL_BYTES
        self.queues.setdefault((source, target), []).append(message)

    def deliver_all(self):
        while self.queues:
            pairs = sorted(self.queues)
            pair = pairs[self.choose(len(pairs))]
            target = pair[1]
            message = self.queues[pair].pop(0)
            if not self.queues[pair]:
                del self.queues[pair]
            if pair != self.dead:
                self.controls[target].receive(message)


def network_of(data, size):
    return Network(size, lambda n: data.draw(st.integers(0, n - 1)))


@given(data=st.data(), size=st.integers(2, 8))
def test_several_requests_one_abort_reason(data, size):
    network = network_of(data, size)
    for rank in data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)):
        network.controls[rank].request_abort(f"reason of rank {rank}")
    network.deliver_all()
    reasons = {control.abort_reason for control in network.controls}
    assert len(reasons) == 1
    assert None not in reasons


@given(data=st.data(), size=st.integers(2, 8))
def test_without_the_arbiter_the_next_rank_decides_for_all_that_are_left(data, size):
    """Those before it may be gone too; a rank learns so before or after it requests an abort, or never."""
    network = network_of(data, size)
    gone = data.draw(st.integers(1, size - 1))
    alive = range(gone, size)
    for rank in data.draw(st.permutations(alive)):
        control = network.controls[rank]
        lost = [lambda c=control, peer=peer: c.lose(peer) for peer in range(gone)]
        request = [lambda c=control, rank=rank: c.request_abort(f"reason of rank {rank}")]
        for act in data.draw(st.permutations(lost + request)):
            act()
        network.queues = {pair: messages for pair, messages in network.queues.items() if pair[1] in alive}
    network.deliver_all()
    reasons = {network.controls[rank].abort_reason for rank in alive}
    assert len(reasons) == 1
    assert None not in reasons


@pytest.mark.parametrize("dead", [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)])
@given(data=st.data(), size=st.integers(3, 8))
def test_one_dead_link_does_not_make_two_reasons(dead, data, size):
    """In one direction: what one rank writes to another is lost. The ranks find reasons of their own, at any time."""
    network = network_of(data, size)
    network.dead = dead

    for control in data.draw(st.permutations(network.controls)):
        control.request_abort(f"reason of rank {control.rank}")
        network.deliver_all()
    for step in (Control.ask, lambda control: control.lose(control.arbiter)):
        for control in data.draw(st.permutations(network.controls)):
            if control.abort_reason is None:
                step(control)
                network.deliver_all()
    reasons = {control.abort_reason for control in network.controls}
    assert len(reasons) == 1
    assert None not in reasons


def test_who_has_not_heard_the_abort_reason_is_told_again():
    arbiter, late = Control(Sender(0, 3)), Control(Sender(2, 3))
    arbiter.request_abort("first")
    arbiter.transport.sent.clear()
    late.request_abort("second")
    arbiter.receive(late.transport.sent[0][1])
    [(target, message)] = arbiter.transport.sent
    other = Control(Sender(2, 3))
    other.receive(message)
    assert (target, other.abort_reason) == (2, "first")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test advances."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("communicators.background.control.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def stopped_arbiter(clock, *mail, seconds=2.0):
    """Rank 0 of 3, as it goes on; each time that it listens, one more message has come."""
    mail = iter(mail)
    arbiter = Control(Sender(0, 3))
    arbiter.transport.read_control = lambda: [message for message in [next(mail, None)] if message]
    arbiter.transport.unreachable = list
    arbiter.listen()
    clock.now += seconds
    arbiter.listen()
    return arbiter


def messages_of_the_next_arbiter():
    """Request, question and abort reason, which is another's here."""
    next_one = Control(Sender(1, 3))
    next_one.request_abort("first")
    next_one.ask()
    next_one._reason = "second"
    next_one.lose(0)
    return [message for peer, message in next_one.transport.sent if peer == 0]


@pytest.mark.parametrize("others_decided", [True, False])
def test_an_arbiter_that_was_stopped_hears_whether_others_have_decided_before_it_speaks(clock, others_decided):
    *requests, abort = messages_of_the_next_arbiter()
    arbiter = stopped_arbiter(clock, None, *requests, *([abort] if others_decided else []))
    decided = []
    for _ in range(7):
        clock.now += LISTEN_SECONDS
        arbiter.listen()
        decided.append(arbiter.abort_reason)
    assert decided[0] is None
    assert set(decided[1:]) == ({"second"} if others_decided else {None, "first"})
    assert arbiter.hears()


@pytest.mark.parametrize("seconds", [0.3, 6.0])
def test_a_rank_that_is_always_slow_speaks_all_the_same(clock, seconds):
    arbiter = stopped_arbiter(clock, seconds=seconds)
    arbiter.transport.read_control = lambda: messages_of_the_next_arbiter()[:1]
    for _ in range(3):
        clock.now += seconds
        arbiter.listen()
    assert arbiter.abort_reason == "first"


def test_a_rank_that_was_stopped_after_its_request_hears_before_it_takes_the_next_arbiter(clock):
    *_, abort = messages_of_the_next_arbiter()
    rank, mail = Control(Sender(2, 3)), iter([None, None, None, abort])
    rank.transport.read_control = lambda: [message for message in [next(mail, None)] if message]
    rank.transport.unreachable = list
    rank.listen()
    requested = RequestedAbort(rank, "mine", patience=0.8)
    clock.now += 3.0
    settled = []
    for _ in range(4):
        settled.append(requested.settled())
        rank.listen()
        clock.now += LISTEN_SECONDS
    assert settled == [False, False, False, True]
    assert rank.abort_reason == "second"


def test_an_arbiter_that_gets_no_time_to_run_for_two_seconds_still_decides(clock):
    """As on a busy machine: the next one would decide beside it, with what it knows of who waits."""
    rank = Control(Sender(1, 3))
    rank.transport.read_control, rank.transport.unreachable = list, list
    requested = RequestedAbort(rank, "timed out: mine")
    for _ in range(round(2.0 / LISTEN_SECONDS)):
        clock.now += LISTEN_SECONDS
        rank.listen()
        assert not requested.settled()
    assert rank.arbiter == 0
    arbiter = Control(Sender(0, 3))
    arbiter.request_abort("the arbiter's")
    rank.receive(arbiter.transport.sent[0][1])
    assert requested.settled()
    assert rank.abort_reason == "the arbiter's"


def test_without_an_answer_a_rank_that_was_stopped_raises_its_own_reason_at_last(clock):
    rank = Control(Sender(2, 3))
    requested = RequestedAbort(rank, "mine", patience=0.8)
    clock.now += 0.7
    assert not requested.settled()
    clock.now += 0.8
    assert requested.settled()
    assert rank.abort_reason == "mine"


def test_one_that_is_out_of_reach_keeps_no_other_from_being_told():
    sent = []

    def send(peer, message):
        if peer == 0:
            raise ConnectionError("reset")
        sent.append(peer)

    rank = Control(Sender(1, 4, send))
    rank.lose(0)
    rank.request_abort("mine")
    assert sent == [2, 3]


@given(flip=st.integers(0, 1 << 20), rank=st.integers(0, 1))
def test_a_letter_that_was_changed_on_its_way_is_a_reason(flip, rank):
    sender = Control(Sender(1, 2))
    sender.request_abort("whatever")
    [(_, message)] = sender.transport.sent
    changed = bytearray(message)
    changed[flip // 8 % len(changed)] ^= 1 << flip % 8
    control = Control(Sender(rank, 2))
    control.receive(bytes(changed))
    if rank == 0:
        assert control.abort_reason == "rank 0 got a corrupted control message: the network changes bits"
    else:
        assert control.abort_reason is None  # it has told the arbiter


@given(data=st.data(), size=st.integers(2, 6))
def test_a_wait_with_other_facts_becomes_an_abort_reason(data, size):
    """Whether the other rank made its call before the message came, or makes it after."""
    network = network_of(data, size)
    waiting, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    late = data.draw(st.booleans())
    controls = network.controls
    controls[waiting].called(4, "gtopk(k=3)")
    if not late:
        controls[other].called(4, "gtopk(k=5)")
    controls[waiting].waits(4, "gtopk(k=3)", [other])
    network.deliver_all()
    assert (controls[0].abort_reason is None) == late
    if late:
        controls[other].called(4, "gtopk(k=5)")
        network.deliver_all()
    reason = controls[0].abort_reason
    assert {control.abort_reason for control in controls} == {reason}
    for rank, k in ((waiting, 3), (other, 5)):
        assert f"rank {rank} calls gtopk(k={k})" in reason


@given(data=st.data(), mine=st.integers(0, 9), theirs=st.integers(0, 9))
def test_a_late_or_early_peer_is_no_reason(data, mine, theirs):
    network = network_of(data, 2)
    for rank, most in ((0, mine), (1, theirs)):
        for number in range(most + 1):
            network.controls[rank].called(number, f"call {number}")
    network.controls[0].waits(mine, f"call {mine}", [1])
    network.deliver_all()
    assert [control.abort_reason for control in network.controls] == [None, None]


@pytest.mark.parametrize("later", [REMEMBERED_CALLS - 1, REMEMBERED_CALLS])
def test_facts_of_so_many_calls_are_remembered_and_of_no_more(later):
    rank, waiting = Control(Sender(0, 2)), Control(Sender(1, 2))
    for number in range(later + 1):
        rank.called(number, "sum")
    waiting.waits(0, "mean", [0])
    rank.receive(waiting.transport.sent[0][1])
    assert (rank.abort_reason is None) == (later == REMEMBERED_CALLS)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_time_out_says_where_the_chain_of_waits_leads(first):
    network = Network(4, lambda n: 0)
    for rank, peer in ((0, 2), (2, 3), (3, 1)):
        network.controls[rank].waits(0, "sum", [peer])
    network.deliver_all()
    network.controls[first].request_abort("timed out after 5 s: it waits for rank 2 in call 0")
    network.deliver_all()
    assert {control.abort_reason for control in network.controls} == {
        "timed out after 5 s: it waits for rank 2 in call 0; all waits lead to rank 1"
    }


def test_who_leaves_is_known_to_all():
    network = Network(3, lambda n: 0)
    for number in range(4):
        network.controls[2].called(number, "sum")
    network.controls[2].in_flight -= {0, 1, 2}
    network.controls[2].depart("ValueError: boom")
    network.deliver_all()
    assert [control.departed for control in network.controls] == [{2: "ValueError: boom"}, {2: "ValueError: boom"}, {}]
    assert network.controls[0].departed_before(2, [1, 2]) == []  # it had ended that call: what it sent may be in flight
    assert network.controls[0].departed_before(3, [1, 2]) == [2]


def test_a_long_reason_fits_its_letter():
    control = Control(Sender(1, 2))
    control.request_abort("é" * 9000)
    [(target, message)] = control.transport.sent
    assert target == 0
    assert len(message) <= CONTROL_BYTES
    arbiter = Control(Sender(0, 2))
    arbiter.receive(message)
    assert arbiter.abort_reason.startswith("ééé")


@given(size=testing.world_sizes(), data=st.data())
def test_agreement_names_the_lowest_ranks_that_differ(size, data):
    facts = [data.draw(st.sampled_from(["a", "b", "c" * 300, "c" * 299])) for _ in range(size)]

    def attempt(comm):
        try:
            run(agreement(facts[comm.rank], 0, comm.rank, comm.size), comm, facts="agreement")
        except CollectiveError as error:
            return str(error)
        return None

    got = SimulatedWorld(size).run(attempt)
    assert len(set(got)) == 1
    assert (got[0] is None) == (len(set(facts)) == 1)
    if got[0] is not None:
        other = next(rank for rank in range(size) if facts[rank] != facts[0])
        assert "rank 0 calls" in got[0]
        assert f"rank {other} calls {facts[other][:100]}" in got[0]


def test_agreement_has_one_size_whatever_the_facts():
    sent = []
    for facts in ("a", "long" * 1000):
        world = SimulatedWorld(5)
        world.run(lambda comm, facts=facts: run(agreement(facts, 0, comm.rank, 5), comm, facts="agreement"))
        sent.append(world.bytes_sent)
    assert sent[0] == sent[1] == [3 * (16 + 2 * (FACTS_BYTES + 4))] * 5


@pytest.mark.parametrize("text", ["x" * 244, "x" * 245, "ü" * 200])
def test_long_facts_still_differ(text):
    def attempt(comm):
        run(agreement(text + str(comm.rank), 0, comm.rank, 2), comm, facts="agreement")

    with pytest.raises(CollectiveError, match="ranks disagree"):
        SimulatedWorld(2).run(attempt)
