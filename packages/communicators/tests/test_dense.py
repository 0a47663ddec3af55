"""Dense collectives: conservation, agreement, bytes and worlds, at any P."""

from __future__ import annotations

import pytest
import torch
from communicators import SLOT_BYTES, Link, SimulatedWorld, allgather, allreduce, broadcast, run, schedules, testing
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.quick

SCHEDULES = [schedules.ring_allreduce, schedules.halving_doubling_allreduce, schedules.doubling_allreduce]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(inputs=testing.inputs())
def test_allreduce_laws(schedule, inputs):
    testing.check_laws(lambda comm, x: run(schedule(x, comm.rank, comm.size), comm), inputs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_allreduce_dtypes(schedule, dtype, data):
    inputs = data.draw(testing.inputs(dtype=dtype, sizes=testing.world_sizes(4)))  # bfloat16 counts to 256
    testing.check_laws(lambda comm, x: run(schedule(x, comm.rank, comm.size), comm), inputs)


@pytest.mark.parametrize("schedule", [*SCHEDULES, schedules.broadcast, schedules.allgather])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_no_result_is_memory_of_a_message(schedule, size):
    """Sends may go on when a call is over, and then the caller may write into its result."""
    sent = []

    def noted(comm):
        rounds, received = schedule(torch.full((24,), 1.0 + comm.rank), comm.rank, comm.size), None
        while True:
            try:
                action = rounds.send(received)
            except StopIteration as end:
                return end.value
            sent.extend((payload, payload.clone()) for payload in action.sends.values())
            received = yield action

    for result in SimulatedWorld(size).run(lambda comm: run(noted(comm), comm)):
        for tensor in result if isinstance(result, list) else [result]:
            tensor.fill_(777)
    assert all(torch.equal(payload.body, before.body) for payload, before in sent)


@given(size=testing.world_sizes(), numel=st.integers(0, 50), seed=st.integers(0, 99))
def test_floats_agree_bit_for_bit(size, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(numel, generator=generator) for _ in range(size)]
    for schedule in SCHEDULES:
        results = SimulatedWorld(size).run(
            lambda comm, schedule=schedule: run(schedule(inputs[comm.rank], comm.rank, comm.size), comm)
        )
        assert all(torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0].double(), sum(x.double() for x in inputs), atol=1e-5, rtol=1e-5)


@given(size=testing.world_sizes(), numel=st.integers(0, 50), seed=st.integers(0, 99))
def test_doubling_has_the_bits_of_halving_and_doubling(size, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [10.0 ** torch.randint(-42, 38, (numel,), generator=generator) for _ in range(size)]
    both = [
        SimulatedWorld(size).run(
            lambda comm, schedule=schedule: run(schedule(inputs[comm.rank], comm.rank, size), comm)
        )
        for schedule in (schedules.halving_doubling_allreduce, schedules.doubling_allreduce)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_doubling_of_unlike_nans_agrees(size):
    """Of two NaN a sum is the first one, whose sign and payload ranks would have in turn."""
    inputs = [torch.full((9,), 0x7FC00000 + rank, dtype=torch.int32).view(torch.float32) for rank in range(size)]
    totals = SimulatedWorld(size).run(
        lambda comm: run(schedules.doubling_allreduce(inputs[comm.rank], comm.rank, size), comm).view(torch.int32)
    )
    assert all(torch.equal(total, totals[0]) for total in totals)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_doubling_sends_what_the_paper_says(size):
    world, rounds = SimulatedWorld(size), size.bit_length() - 1
    world.run(lambda comm: allreduce(torch.ones(1024), comm, native=False))
    assert world.bytes_sent == [rounds * (4096 + SLOT_BYTES)] * size
    assert world.messages_sent == [rounds] * size


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_halving_doubling_sends_what_the_paper_says(size):
    numel, rounds = 1024, 2 * (size.bit_length() - 1)
    world = SimulatedWorld(size)
    world.run(lambda comm: run(schedules.halving_doubling_allreduce(torch.ones(numel), comm.rank, comm.size), comm))
    assert world.bytes_sent == [2 * numel * 4 * (size - 1) // size + rounds * SLOT_BYTES] * size
    assert world.messages_sent == [rounds] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ring_sends_what_the_paper_says(size):
    numel = 120
    world = SimulatedWorld(size)
    world.run(lambda comm: run(schedules.ring_allreduce(torch.ones(numel), comm.rank, comm.size), comm))
    rounds = 2 * (size - 1)
    assert world.bytes_sent == [rounds * (numel // size * 4 + SLOT_BYTES)] * size


def test_time_follows_the_link_model():
    """Halving-doubling takes 2 log P messages, one after another, of n/2, n/4, … elements."""
    link = Link()
    world = SimulatedWorld(8, link)
    world.run(lambda comm: allreduce(torch.ones(8192), comm, native=False))
    expected = 2 * sum(link.seconds(SLOT_BYTES + 4 * 8192 // share) for share in (2, 4, 8))
    assert world.elapsed == pytest.approx(expected)


@given(size=testing.world_sizes(), numel=st.integers(0, 20), data=st.data())
def test_broadcast_gives_the_roots_tensor(size, numel, data):
    root = data.draw(st.integers(0, size - 1))
    world = SimulatedWorld(size)
    results = world.run(lambda comm: broadcast(torch.full((numel, 2), comm.rank), comm, root=root))
    assert all(torch.equal(result, torch.full((numel, 2), root)) for result in results)
    assert sum(world.messages_sent) == size - 1


@given(size=testing.world_sizes(), numels=st.lists(st.integers(0, 9), min_size=16, max_size=16))
def test_allgather_of_unequal_sizes(size, numels):
    world = SimulatedWorld(size)
    results = world.run(lambda comm: allgather(torch.full((numels[comm.rank],), comm.rank * 0.5), comm))
    for result in results:
        assert [part.tolist() for part in result] == [[rank * 0.5] * numels[rank] for rank in range(size)]
    rounds = (size - 1).bit_length()
    assert world.messages_sent == [2 * rounds] * size


def test_average_shape_and_input_stay():
    x = torch.arange(6.0).view(2, 3)
    results = SimulatedWorld(3).run(lambda comm: allreduce(x * (comm.rank + 1), comm, average=True))
    assert all(torch.equal(result, 2 * x) for result in results)
    assert torch.equal(x, torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda comm: allreduce(torch.ones(2, dtype=torch.int32), comm, average=True), TypeError),
        (lambda comm: allreduce(torch.ones(2).to_sparse(), comm), TypeError),
        (lambda comm: broadcast(torch.ones(2), comm, root=5), ValueError),
    ],
)
def test_wrong_arguments(call, error):
    with pytest.raises(error, match=r"expected|use|exact"):
        SimulatedWorld(2).run(call)


def test_conjugate_and_negated_views_are_gathered():
    given = torch.tensor([1 + 2j, 3 - 1j])
    for view in (given.conj(), given.conj().imag):
        [found, _] = SimulatedWorld(2).run(lambda comm, view=view: allgather(view, comm))
        assert all(torch.equal(one, view.clone()) for one in found)
