"""What somebody who writes, or calls, a collective gets wrong is named, before anything is sent."""

from __future__ import annotations

import importlib
import math
import sys

import numpy as np
import pytest
import torch
from communicators import (
    CollectiveError,
    Elapse,
    Payload,
    Round,
    SimulatedWorld,
    allreduce,
    allreduce_async,
    run,
    schedules,
    start,
    testing,
)
from communicators.worlds.alone import Alone
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick


def yielding(action):
    def schedule():
        yield action

    return schedule()


def mistaken(schedule):
    """What two ranks are told of a schedule that both run."""
    with pytest.raises(CollectiveError) as caught:
        SimulatedWorld(2).run(lambda comm: run(schedule(1 - comm.rank), comm, facts="mine"))
    return str(caught.value)


@pytest.mark.parametrize("begin", [run, start])
@pytest.mark.parametrize("schedule", [None, lambda: None, [Round()], iter([Round()]), torch.ones(2)])
def test_what_is_no_schedule(begin, schedule):
    with pytest.raises(TypeError, match="expected a generator"):
        begin(schedule, Alone())
    with pytest.raises(TypeError, match="expected a generator"):
        SimulatedWorld(2).run(lambda comm: begin(schedule, comm))


@pytest.mark.parametrize("action", [None, torch.ones(3), {1: Payload.of(torch.ones(1))}, yielding(Round())])
def test_a_yield_that_is_no_round(action):
    assert "the schedule yielded" in mistaken(lambda peer: yielding(action))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda peer: Round({peer: torch.arange(1, 40, dtype=torch.uint8)}), "make it by Payload.of(tensor)"),
        (lambda peer: Round({peer: torch.ones(9)}), "make it by Payload.of(tensor)"),
        (lambda peer: Round({peer: b"bytes" * 10}), "the payload for rank"),
        (lambda peer: Round({peer: Payload.of(torch.ones(1))}, {peer: -1}), "-1 bytes to receive"),
        (lambda peer: Round({peer: Payload.of(torch.ones(1))}, {peer: 20.0}), "20.0 bytes to receive"),
        (lambda peer: Round({1 - peer: Payload.of(torch.ones(1))}), "cannot exchange with rank"),
        (lambda peer: Round({float(peer): Payload.of(torch.ones(1))}), "cannot exchange with rank"),
        (lambda peer: Round({np.int64(peer): Payload.of(torch.ones(1))}), "(int64), expected another rank as an int"),
        (lambda peer: Round({peer: Payload.of(torch.ones(1))}, {peer: np.int64(4)}), "given as int64, expected"),
    ],
)
def test_a_round_that_cannot_be(make, said):
    assert said in mistaken(lambda peer: yielding(make(peer)))


@pytest.mark.parametrize("begin", [run, start])
def test_a_generator_runs_once(begin):
    """Run again it would return None at once, on every rank, as if it had nothing to exchange."""

    def twice(comm):
        schedule = schedules.allreduce(torch.ones(3), comm.rank, comm.size)
        run(schedule, comm)
        with pytest.raises(ValueError, match="allreduce has run before, and a generator runs once: call its function"):
            begin(schedule, comm)
        begun = schedules.allreduce(torch.ones(3), comm.rank, comm.size)
        next(begun, None)
        with pytest.raises(ValueError, match="has run before"):
            begin(begun, comm)

    SimulatedWorld(2).run(twice)
    twice(Alone())


def test_a_collective_inside_a_schedule_says_what_to_write():
    def schedule(comm):
        yield Round()
        allreduce(torch.ones(3), comm)

    with pytest.raises(CollectiveError, match=r"in a schedule, would wait for itself.*by `yield from`"):
        SimulatedWorld(2).run(lambda comm: run(schedule(comm), comm))


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_computation_takes_no_less_than_nothing(seconds):
    """NaN broke the order of events, so that messages came at other times."""
    for compute in (lambda comm: comm.elapse(seconds), lambda comm: run(yielding(Elapse(seconds)), comm)):
        with pytest.raises((ValueError, CollectiveError), match="takes 0 seconds or more, got"):
            SimulatedWorld(2).run(compute)


def everybodys(x, rank, size):
    """The vectors of all ranks, by rank, as they come."""
    peers = [peer for peer in range(size) if peer != rank]
    received = yield Round({peer: Payload.of(x) for peer in peers}, dict.fromkeys(peers, x.nbytes))
    return {rank: x} | {peer: payload.view(x.dtype) for peer, payload in received.items()}


def in_rank_order(x, rank, size):
    vectors = yield from everybodys(x, rank, size)
    return sum(vectors[peer] for peer in range(size))


def own_first(x, rank, size):
    vectors = yield from everybodys(x, rank, size)
    return sum(vectors[(rank + distance) % size] for distance in range(size))


def as_they_come(x, rank, size):
    vectors = yield from everybodys(x, rank, size)
    return sum(vectors.values())


def into_the_input(x, rank, size):
    vectors = yield from everybodys(x, rank, size)
    for peer in range(size):
        if peer != rank:
            x += vectors[peer]
    return x


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (in_rank_order, None),
        (own_first, "agreement: rank 1 against rank 0 of 5 in the first world, on floats whose sums round"),
        (as_they_come, "on floats whose sums round: do all add in one order?"),
        (into_the_input, "input: the collective changed that of rank 0 of 5"),
    ],
)
def test_the_laws_find_an_order_of_adding_and_a_changed_input(schedule, said):
    """Sums of integers are the same in any order."""

    def check():
        inputs = [torch.arange(40.0) * rank - 9 for rank in range(5)]
        return testing.check_laws(lambda comm, x: run(schedule(x, comm.rank, comm.size), comm), inputs)

    if said is None:
        assert check()[0].tolist() == [10 * x - 45 for x in range(40)]
        return
    with pytest.raises(AssertionError) as caught:
        check()
    assert said in str(caught.value)


def test_what_was_received_may_be_handed_on():
    """Its slot holds the stamp of the message that it came in."""

    def ring(x, rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        payload = Payload.of(x)
        for _ in range(size):
            payload = (yield Round({after: payload}, {before: payload.nbytes}))[before]
        return payload.view(torch.float32)

    for rank, got in enumerate(SimulatedWorld(3).run(lambda c: run(ring(torch.ones(4) * c.rank, c.rank, 3), c))):
        assert got.tolist() == [rank] * 4


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [0, -1, -0.5, math.nan])
def test_a_timeout_that_is_none(timeout):
    comm = Alone()
    with pytest.raises(ValueError, match="expected more than 0"):
        run(yielding(Round()), comm, timeout=timeout)
    with pytest.raises(ValueError, match="expected more than 0"):
        comm.timeout = timeout
    for wrong in ("5", True, [5]):
        with pytest.raises(TypeError, match="expected seconds as a number"):
            start(yielding(Round()), comm, timeout=wrong)
    comm.timeout = 7
    assert comm.timeout == 7.0


@pytest.mark.parametrize("given", [[1.0, 2.0], np.ones(2), 3.0])
def test_what_is_no_tensor(given):
    with pytest.raises(TypeError, match="takes a torch tensor, got"):
        allreduce(given, Alone())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.from_numpy(np.ones(3, np.uint32)), r"uint32 does not add in torch: .* \.to\(torch.int64\)"),
        (lambda: torch.ones(3).to(torch.float8_e5m2), r"float8_e5m2 does not add in torch: .* \.to\(torch.float32\)"),
        (lambda: torch.ones(3, device="meta"), "got a meta one"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "got a nested one"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "got a quantized one"),
    ],
)
def test_what_does_not_add_is_refused_before_anything_is_sent(make, said):
    """Else it would fail the communicator, on all ranks."""

    def body(comm):
        for call in (allreduce, allreduce_async):
            with pytest.raises(TypeError, match=said):
                call(make(), comm)
        return float(allreduce(torch.ones(1), comm))

    assert SimulatedWorld(2).run(body) == [2.0, 2.0]


def test_tensors_of_unlike_shapes_are_refused():
    """Equally many elements in another order are not the same thing."""
    with pytest.raises(CollectiveError, match=r"shape=\(3, 2\).*shape=\(2, 3\)"):
        SimulatedWorld(2).run(lambda comm: allreduce(torch.ones((2, 3) if comm.rank else (3, 2)), comm))


@pytest.mark.parametrize("native", [True, False])
def test_a_mean_is_no_sum(native):
    with pytest.raises(CollectiveError, match=r"rank 0 calls allreduce.*rank 1 calls mean by allreduce"):
        SimulatedWorld(2).run(lambda c: allreduce(torch.ones(3), c, average=c.rank == 1, native=native))


@given(size=st.sampled_from([1, 2, 3, 5, 8]), numel=st.sampled_from([1, 5, 40_000]))
def test_a_background_sum_is_of_what_was_given_when_it_was_called(size, numel):
    def body(comm):
        x = torch.full((numel,), 1.0)
        work = allreduce_async(x, comm)
        x.fill_(100.0)
        comm.elapse(1.0)
        return work.wait()

    for total in SimulatedWorld(size).run(body):
        assert bool((total == size).all())


def test_laws_without_hypothesis_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "communicators.testing", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "thinwire-communicators\[testing\]"'):
        importlib.import_module("communicators.testing")
