"""Mutated messages of every kind: a result, or an error with a name; never a crash, a hang or an allocation."""

import io
import json
import random
import threading
import zlib

import pytest
import torch
from communicators import CollectiveError, Corrupts, Elastic, Payload, SimulatedWorld, collectives, run, schedules
from communicators.background import signals
from communicators.background.agreement import agreement
from communicators.background.call import Call
from communicators.background.control import Control
from communicators.elastic import transfer
from communicators.elastic.board import Board, Record, Said
from communicators.elastic.store import LINE, StoreBoard
from communicators.schedules.quantised import packed, quantised_nbytes, unpacked
from communicators.worlds.meeting import meet
from mutants import Foreign, Tally, mutated, mutated_archive, mutated_json, saved
from torch._C._distributed_c10d import HashStore

pytestmark = pytest.mark.quick


class Peer:
    """Transport of rank 0 or 1 of three, as far as a control writes to it."""

    def __init__(self, rank):
        self.rank, self.size, self.sent = rank, 3, []

    def send_control(self, peer, message):
        assert peer in range(3)
        self.sent.append(message)

    def read_control(self):
        return self.came

    def unreachable(self):
        return []


def letters():
    """Control messages of every kind, as rank 1 writes them."""
    own = Control(Peer(1))
    own.called(3, "gtopk(k=3)")
    own.waits(3, "gtopk(k=3)", [0, 2])
    own.request_abort("timed out: it waits for rank 0")
    own.ask()
    own.depart("ValueError: boom")
    own.lose(0)
    return sorted(set(own.transport.sent))


def resealed(message):
    """The message with the checksum of what it now holds, as a rank that lies would write it."""
    return zlib.crc32(message[4:]).to_bytes(4, "big") + message[4:]


@pytest.mark.slow
def test_control_messages():
    dice, tally, known = random.Random(1), Tally(CollectiveError), letters()
    assert {json.loads(letter[4:])["kind"] for letter in known} == {"waits", "request", "asks", "departed", "abort"}
    for _ in range(2000):
        letter = dice.choice(known)
        text = dice.choice([mutated, lambda b, d: mutated_json(b.decode(), d).encode()])(letter[4:], dice)
        message = resealed(letter[:4] + text) if dice.random() < 0.8 else mutated(letter, dice)
        hears = Control(Peer(dice.choice([0, 2])))
        hears.called(3, "gtopk(k=5)")

        def listen(hears=hears, message=message):
            for hears.transport.came in ([message], known):
                assert hears.listen(), hears.abort_reason
            hears.departed_before(3, [1, 2])
            hears.waits(3, "gtopk(k=5)", [1])
            hears.request_abort("timed out: mine")
            assert set(hears.departed) <= {0, 1, 2}
            said = [hears.abort_reason or "", *map(str, hears.transport.sent)]
            if any("got a corrupted control message: the network changes bits" in one for one in said):
                raise CollectiveError("it is told")

        tally.attempt(listen, "control")
    tally.check(2000)


def alone(schedule, *bodies):
    """Result of a schedule whose peers send these bodies, each cut or filled up to the size that it waits for."""
    bodies = iter(bodies)
    try:
        action = next(schedule)
        while True:
            received = {}
            for source, nbytes in action.recvs.items():
                body = next(bodies, b"").ljust(nbytes, b"\0")[:nbytes]
                received[source] = Payload(torch.frombuffer(bytearray(16) + body, dtype=torch.uint8))
            action = schedule.send(received)
    except StopIteration as stop:
        return stop.value


def test_agreements():
    dice, tally = random.Random(2), Tally(CollectiveError)
    honest = agreement("gtopk(k=3)", 0, 1, 2)
    sent = next(honest).sends[0].body.numpy().tobytes()
    for _ in range(500):
        own = agreement("gtopk(k=3)", 0, 0, 2)
        tally.attempt(lambda own=own: alone(own, mutated(sent, dice)), "agreement")
    tally.check(500)


def test_signals():
    dice, tally, message = random.Random(3), Tally(CollectiveError), signals._packed([1, -5, 1 << 60], False)
    for _ in range(1000):
        came = mutated(message, dice)
        if dice.random() < 0.5:
            came = zlib.crc32(came[4:]).to_bytes(4, "little") + came[4:]

        def take(came=came):
            values, _ = signals._unpacked(came, 0)
            assert len(values) <= signals.MOST_VALUES

        tally.attempt(take, "signals")
    tally.check(1000)


def test_stamps_and_sizes():
    dice, tally = random.Random(4), Tally(CollectiveError)
    for _ in range(500):
        call = Call(iter(()), rank=0, size=2, facts="f", number=7)
        sender = Call(iter(()), rank=1, size=2, facts="f", number=7)
        sent = Payload.of(torch.arange(20))
        sender.stamp(sent)
        room, came = Payload.allocate(160), mutated(sent.memory.numpy().tobytes(), dice)[:176]
        room.memory[: len(came)] = torch.frombuffer(bytearray(came), dtype=torch.uint8) if came else 0

        def take(call=call, room=room, sent=sent):
            took = call.take(1, room, torch.device("cpu"))
            assert took.memory.numpy().tobytes() == sent.memory.numpy().tobytes()

        tally.attempt(take, "stamp")
    tally.check(500)


class Memory(Board):
    """Board in a dictionary."""

    name = "a"
    get = swap = append = pause = clock = wait_in_line = leave_line = waiting = connect = unreached = None
    at_exit = retire = None

    def __init__(self, text):
        self.get = lambda key: text


RECORDS = [
    Record(3, ("a", "b", "c"), ("c",), 5, (4, 2), (4, 2), "a", "at_least=1, timeout=300"),
    Record(1, ("a", "b"), run="b", alike="x"),
    Record(9, run="b", alike="x"),
]
SAID = [
    ["a", Said(5, True, 7, (1, 2, 3), ("d",))],
    ["b", Said(4, committed=(0, 0, 0), out=True, failed=True, unreached=("a",))],
]


def test_entries_of_the_board_of_elastic_ranks():
    dice, tally = random.Random(5), Tally(CollectiveError)
    for _ in range(1000):
        text = mutated_json(dice.choice(RECORDS).text(), dice)

        def look(text=text):
            record = Memory(text).record()
            assert record == Record.of(record.text())
            assert set(record.joined) <= set(record.members)
            assert bool(record.settled) == bool(record.members)
            assert len(record.drawn) == len(record.committed)

        tally.attempt(look, "record")
    lines = [json.dumps([name, vars(said)], default=list) + "\n" for name, said in SAID]
    for _ in range(1000):
        text = "".join([dice.choice(lines), mutated_json(dice.choice(lines), dice), dice.choice(["", *lines])])

        def hear(text=text):
            for name, said in Memory(text).said(4, ("a", "b", "c")).items():
                assert name in ("a", "b", "c")
                assert len(said.committed) == 3
                assert said.taken >= 0 <= said.drawn

        tally.attempt(hear, "said")
    tally.check(2000)


def test_the_line_of_newcomers():
    dice, tally, line = random.Random(6), Tally(CollectiveError), json.dumps(["host:1:aa", "host:2:bb"])
    for _ in range(300):
        store, text = HashStore(), mutated_json(line, dice)
        store.set(f"x/{LINE}", text)
        board = StoreBoard(lambda store=store: store, "x")
        board.patience = 0.0

        def wait(board=board):
            board.wait_in_line()
            board.leave_line()

        tally.attempt(wait, "line")
    tally.check(300)


def test_words_by_which_ranks_meet():
    dice, tally, store = random.Random(7), Tally(CollectiveError), HashStore()
    other = threading.Thread(target=meet, args=(store, 1, 2, 5.0))
    other.start()
    meet(store, 0, 2, 5.0)
    other.join()
    word = bytes(store.get("here/1"))
    for _ in range(100):
        store.set("here/1", mutated(word, dice))
        tally.attempt(lambda: meet(store, 0, 2, 0.0), "meet")
    tally.check(100)


STATE = {
    "own": {"alike": "SGD", "parameters": {"w": torch.randn(5)}, "step": 7},
    "carried": [{"state": {"last_epoch": 3}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}],
    "dealer": {"deal": None, "held": [], "missed": []},
}


@pytest.mark.slow
def test_states_for_newcomers():
    dice, tally, archive = random.Random(8), Tally(transfer.UnreadableError), saved(STATE)
    for _ in range(1000):
        packed_ = mutated_archive(archive, dice)
        nbytes = torch.tensor([dice.choice([-1, len(packed_) - 1]) if dice.random() < 0.1 else len(packed_)])

        def take(packed_=packed_, nbytes=nbytes):
            state = transfer.unpacked(alone(transfer.take(), nbytes.numpy().tobytes(), packed_))
            assert isinstance(state["own"], dict)

        tally.attempt(take, "state")
    tally.check(1000)


def test_what_a_state_would_call_is_not_called(tmp_path):
    made = tmp_path / "made"
    archive = saved({**STATE, "own": {"step": Foreign(made)}})
    with pytest.raises(transfer.UnreadableError, match="UnpicklingError"):
        transfer.unpacked(io.BytesIO(archive))
    assert not made.exists()
    torch.load(io.BytesIO(archive), weights_only=False)  # so this shows something
    assert made.exists()


@pytest.mark.slow
def test_a_newcomer_gives_up_where_no_state_is_readable(monkeypatch):
    """It would come again and again, and the others wait for it every time."""
    monkeypatch.setattr(transfer, "packed", lambda state, packed=transfer.packed: packed(state)[:-40])

    def body(comm):
        if newcomer := comm.rank == 2:
            comm.elapse(0.3)
        world, step = Elastic(comm, at_least=1, timeout=0.1), 0
        if newcomer:
            with pytest.raises(CollectiveError, match=r"could not join in 5 attempts.*cannot be read \(RuntimeError\)"):
                world.joining  # noqa: B018
            return None
        while step < 500:
            comm.elapse(0.01)
            world.atomic(lambda: collectives.allreduce(torch.ones(3), world))
            step += 1
            world.boundary(lambda step=step: {"step": step})
        generation = world.generation
        world.close()
        return generation

    assert SimulatedWorld(3).run(body) == [11, 11, None]


def test_sizes_of_what_ranks_gather():
    dice, tally, eight = random.Random(9), Tally(CollectiveError), torch.tensor([32]).numpy().tobytes()
    for _ in range(300):
        size = mutated(eight, dice)
        if 1 << 20 <= int.from_bytes(size.ljust(8, b"\0")[:8], "little", signed=True) <= 1 << 40:
            continue  # memory that is reserved, but touched only as far as something comes
        tally.attempt(lambda size=size: alone(schedules.allgather(torch.ones(8), 0, 2), size), "sizes")
    tally.check(tally.refused + tally.taken)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantised_elements(bits):
    """Any bytes are elements: as many as there should be, none beyond float32."""
    dice, x = random.Random(10), torch.randn(1500)
    sound, nbytes = packed(x, bits).numpy().tobytes(), quantised_nbytes(len(x), bits)
    for _ in range(300):
        kept = nbytes - 2 if dice.random() < 0.5 else 0  # or the exponents alone
        came = bytearray(sound[:kept] + mutated(sound[kept:], dice).ljust(nbytes, b"\0"))[:nbytes]
        read = unpacked(torch.frombuffer(came, dtype=torch.int8), len(x), bits)
        assert read.shape == x.shape
        assert not read.isinf().any()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dense", "quantised"])
def test_bits_that_a_network_changes(algorithm):
    """Every message has a checksum, whose own bits, and the stamp's, may change too."""
    tally = Tally(CollectiveError)
    make = {"dense": schedules.allreduce, "quantised": schedules.quantised_allreduce}[algorithm]

    def total(comm):
        got = run(make(torch.arange(5000.0), comm.rank, comm.size), comm, facts="sum")  # no short sum: 4 messages
        return got[0].tolist() if algorithm == "quantised" else got.tolist()

    sound = SimulatedWorld(3).run(total)
    for case in range(200):
        dice = random.Random(case)
        faults = [Corrupts(dice.randrange(3), message=dice.randrange(4), bit=dice.randrange(1 << 20))]

        def same(world=SimulatedWorld(3, faults=faults)):  # noqa: B008 - another one each time
            assert world.run(total) == sound

        tally.attempt(same, algorithm)
    tally.check(200)
