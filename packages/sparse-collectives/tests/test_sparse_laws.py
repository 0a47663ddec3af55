"""Conservation, agreement, worlds and bytes, for every algorithm in ALGORITHMS."""

import operator

import pytest
import torch
from communicators import SLOT_BYTES, Round, SimulatedWorld, run, testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, sparse_allreduce
from sparse_collectives.testing import check_sparse_call
from sparse_compress import FREE_BYTES, topk

pytestmark = pytest.mark.quick

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@every_algorithm
@settings(max_examples=settings.default.max_examples * 3 // 5)
@given(dtype=st.sampled_from([torch.float32, torch.float64]), data=st.data())
def test_laws(name, dtype, data):
    dense = data.draw(testing.inputs(numels=st.integers(1, 60), dtype=dtype))
    k = data.draw(st.integers(1, len(dense[0]) + 3), label="k")
    entries = [data.draw(st.integers(0, len(dense[0])), label="entries") for _ in dense]  # fewer or more than k
    check_sparse_call(name, [topk(x, count) for x, count in zip(dense, entries, strict=True)], k=k)


@pytest.mark.few(3)
@every_algorithm
@pytest.mark.parametrize("size", [14, 33])
def test_laws_with_many_ranks(name, size):
    generator = torch.Generator().manual_seed(size)
    dense = [torch.randint(-99, 100, (257,), generator=generator).float() for _ in range(size)]
    check_sparse_call(name, [topk(x, 7) for x in dense], k=7)


@pytest.mark.few(34)
@every_algorithm
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_tiny_vectors_have_more_ranks_than_elements(name, n, size):
    check_sparse_call(name, [topk(torch.arange(rank, rank + n).float(), n) for rank in range(size)], k=1)


@every_algorithm
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_ranks_agree_on_any_floats_in_any_order_of_delivery(name, data):
    size, n = data.draw(testing.world_sizes(8)), data.draw(st.integers(1, 20))
    row = st.lists(st.floats(width=32), min_size=n, max_size=n)  # NaN, infinities, denormals, −0 and ties among them
    dense = [torch.tensor(data.draw(row)) for _ in range(size)]
    world = SimulatedWorld(size, seed=data.draw(st.integers(0, 9)), jitter=1e-3)
    results = world.run(lambda comm: sparse_allreduce(topk(dense[comm.rank], 3), comm, k=3, algorithm=name))
    for result in results:
        assert torch.equal(result.total.pack()[16:], results[0].total.pack()[16:])


@every_algorithm
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_agree_on_nan_payloads_which_do_not_commute(name, size):
    dense = [torch.tensor([0x7FC00001 + rank, 0], dtype=torch.int32).view(torch.float32) for rank in range(size)]
    world = SimulatedWorld(size)
    results = world.run(lambda comm: sparse_allreduce(topk(dense[comm.rank], 1), comm, k=1, algorithm=name))
    assert len({result.total.values.view(torch.int32)[0].item() for result in results}) == 1


@pytest.mark.few(32)
@every_algorithm
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 14, 33])
def test_rounds(name, size):
    def watched(schedule, rounds):
        received = {}
        while True:
            try:
                action = schedule.send(received) if rounds else next(schedule)
            except StopIteration as stop:
                return stop.value
            rounds.append(isinstance(action, Round))
            received = yield action

    entry, counts = ALGORITHMS[name], [[] for _ in range(size)]

    def body(comm):
        schedule = entry.schedule(topk(torch.ones(50), 4), comm.rank, size, 4)
        return run(watched(schedule, counts[comm.rank]), comm, facts="watched")

    SimulatedWorld(size).run(body)
    counted = [sum(rounds) for rounds in counts]
    said = [entry.sent(rank, size, 4, 50, torch.float32).rounds for rank in range(size)]
    assert counted == said if entry.exact else all(map(operator.le, counted, said))


def test_the_header_of_a_packed_vector_has_room_for_the_slot():
    assert SLOT_BYTES == FREE_BYTES
