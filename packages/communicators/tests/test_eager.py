"""Messages of rounds over gloo: short ones do not wait for their receiver."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from communicators.worlds import eager
from communicators.worlds.eager import ROOM_BYTES, ROOMS, EagerMessages
from communicators.worlds.gloo_group import WAIT, GlooGroup
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([ROOM_BYTES + more for more in (-1, 0, 1, 5, ROOM_BYTES)]))


@contextmanager
def pair():
    """Groups of two ranks in one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: GlooGroup(store, rank, 2), range(2)))
        try:
            yield made
        finally:
            list(pool.map(lambda group: group.end(5.0), made))


@pytest.fixture
def groups():
    with pair() as made:
        yield made


def in_time(over, seconds=20.0):
    end = time.monotonic() + seconds
    while not over() and time.monotonic() < end:
        time.sleep(1e-3)
    return over()


def received(messages, nbytes, tag, *, bounded=False):
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    arrival = messages.receive(memory, 0, tag, bounded=bounded)
    assert in_time(lambda: arrival.wait.done)
    if arrival.wait.error is not None:
        raise arrival.wait.error
    return memory


def body(nbytes, tag):
    return (torch.arange(nbytes) * 7 + tag).byte()


@given(
    messages=st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 9)), min_size=1, max_size=3 * ROOMS),
    order=st.randoms(use_true_random=False),
    early=st.booleans(),
)
def test_every_message_reaches_who_asked_for_it(messages, order, early):
    """In any order, asked for before it comes or after, with room for more where the length is not known."""
    with pair() as groups:
        one, other = map(EagerMessages, groups)
        numbered = list(enumerate(messages))
        asked, sent = order.sample(numbered, len(numbered)), order.sample(numbered, len(numbered))

        def send():
            return [wait for tag, (n, bounded, _) in sent for wait in one.send(body(n, tag), 1, tag, bounded=bounded)]

        def ask():
            rooms = {}
            for tag, (n, bounded, more) in asked:
                memory = torch.full((n + bounded * more,), 255, dtype=torch.uint8)
                rooms[tag] = memory, other.receive(memory, 0, tag, bounded=bounded)
            return rooms

        if early:
            waits, rooms = send(), ask()
        else:
            rooms = ask()
            waits = send()
        for tag, (n, _, _) in numbered:
            memory, arrival = rooms[tag]
            assert in_time(lambda arrival=arrival: arrival.wait.done), f"{n} bytes of tag {tag} have not come"
            assert arrival.wait.error is None
            assert torch.equal(memory[:n], body(n, tag))
            assert (memory[n:] == 255).all()
        assert in_time(lambda: all(wait.done for wait in waits))


def test_a_message_is_there_before_it_is_asked_for(groups):
    """Else its round takes 2α: a word that there is room, then the message."""
    one, other = map(EagerMessages, groups)
    one.send(body(3, 1), 1, 1, bounded=False)
    assert torch.equal(received(other, 3, 1), body(3, 1))
    waits = [wait for tag in range(2, 2 + ROOMS) for wait in one.send(body(9, tag), 1, tag, bounded=False)]
    assert in_time(lambda: all(wait.done for wait in waits))
    assert in_time(lambda: len(other._inboxes[0]._early) == ROOMS)
    memory = torch.zeros(9, dtype=torch.uint8)
    assert other.receive(memory, 0, 3, bounded=False).wait.done
    assert torch.equal(memory, body(9, 3))


def test_a_sender_that_runs_ahead_is_held_back_until_a_message_is_asked_for(groups):
    """Not by what is in front of that message: it would wait for ever."""
    one, other = map(EagerMessages, groups)
    one.send(body(3, 1), 1, 1, bounded=False)
    received(other, 3, 1)
    waits = [wait for tag in range(2, 50) for wait in one.send(body(ROOM_BYTES, tag), 1, tag, bounded=False)]
    assert in_time(lambda: len(other._inboxes[0]._early) == ROOMS)
    time.sleep(0.1)
    assert sum(wait.done for wait in waits) == ROOMS
    assert torch.equal(received(other, ROOM_BYTES, 40), body(ROOM_BYTES, 40))
    assert not all(wait.done for wait in waits)
    for tag in (*range(2, 40), *range(41, 50)):
        assert torch.equal(received(other, ROOM_BYTES, tag), body(ROOM_BYTES, tag))
    assert len(other._inboxes[0]._free) <= ROOMS


def test_what_nobody_wants_any_more_takes_no_room(groups):
    """Messages of calls that were given up, and of such that were never asked for: later ones are early as before."""
    one, other = map(EagerMessages, groups)
    one.send(body(3, 1), 1, 1, bounded=False)
    received(other, 3, 1)
    given_up = {tag: other.receive(torch.zeros(5, dtype=torch.uint8), 0, tag, bounded=False) for tag in range(2, 9)}
    for arrival in given_up.values():
        other.cancel({0: arrival})
    inbox = other._inboxes[0]
    for tag in given_up:
        one.send(body(5, tag), 1, tag, bounded=False)
    assert in_time(lambda: not inbox._unwanted)
    assert not inbox._early
    assert len(inbox._free) <= ROOMS
    assert not any(arrival.wait.done for arrival in given_up.values())
    for tag in range(10, 10 + ROOMS):  # of which nobody knows
        one.send(body(5, tag), 1, tag, bounded=False)
    assert in_time(lambda: len(inbox._early) == ROOMS)
    one.send(body(5, 20), 1, 20, bounded=False)
    assert torch.equal(received(other, 5, 20), body(5, 20))
    assert len(inbox._posted) >= ROOMS - 1
    [wait] = one.send(body(5, 21), 1, 21, bounded=False)
    assert in_time(lambda: wait.done and len(inbox._early) == ROOMS + 1)


def test_threads_that_meet_a_peer_at_once_have_one_inbox(monkeypatch):
    """A second one would take the first one's messages."""
    made, inbox = [], eager._Inbox

    def slowly(data, peer):
        time.sleep(0.05)
        made.append(peer)
        return inbox(data, peer)

    monkeypatch.setattr(eager, "_Inbox", slowly)
    with pair() as groups, ThreadPoolExecutor(4) as pool:
        one, other = map(EagerMessages, groups)
        got = pool.map(lambda tag: received(other, 3, tag), range(1, 5))
        for tag in range(1, 5):
            one.send(body(3, tag), 1, tag, bounded=False)
        assert all(torch.equal(memory, body(3, tag)) for tag, memory in enumerate(got, 1))
    assert sorted(made) == [0, 1]


def test_calls_whose_tags_are_alike_are_told_apart(groups):
    one, other = map(EagerMessages, groups)
    for call in (1, 2):
        one.send(body(4, call), 1, 7, call=call, bounded=False)
    memories = {call: torch.zeros(4, dtype=torch.uint8) for call in (2, 1)}
    arrivals = [other.receive(memory, 0, 7, call=call, bounded=False) for call, memory in memories.items()]
    assert in_time(lambda: all(arrival.wait.done for arrival in arrivals))
    assert all(torch.equal(memory, body(4, call)) for call, memory in memories.items())


def test_a_peer_that_is_gone_is_said(groups):
    """What had come before is there nevertheless."""
    one, other = map(EagerMessages, groups)
    one.send(body(3, 1), 1, 1, bounded=False)
    received(other, 3, 1)
    one.send(body(3, 2), 1, 2, bounded=False)
    asked = other.receive(torch.zeros(3, dtype=torch.uint8), 0, 3, bounded=False)
    assert in_time(lambda: 2 in other._inboxes[0]._early)
    groups[0].end(5.0)
    assert in_time(lambda: asked.wait.done)
    assert asked.wait.error is not None
    assert torch.equal(received(other, 3, 2), body(3, 2))
    with pytest.raises(RuntimeError):
        received(other, 3, 4)
    [wait] = other.send(body(3, 5), 0, 5, bounded=False)
    assert in_time(lambda: wait.done)


def test_a_message_longer_than_its_room_is_cut(groups):
    """Its stamp then says so; of gloo's own it would end the process."""
    one, other = map(EagerMessages, groups)
    for tag, (sent, room) in enumerate([(9, 5), (2 * ROOM_BYTES, ROOM_BYTES - 1), (2 * ROOM_BYTES, ROOM_BYTES + 5)]):
        one.send(body(sent, tag), 1, tag, bounded=True)
        least = min(room, ROOM_BYTES)
        assert torch.equal(received(other, room, tag, bounded=True)[:least], body(sent, tag)[:least])


def test_a_wait_outlasts_any_training():
    """gloo closes all connections where one times out, and a peer may have nothing to say for days."""
    assert timedelta(days=365) < WAIT
