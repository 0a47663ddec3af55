"""The call itself: arguments, padding, cutting, the background, and algorithms with a state or a selection."""

import copy
from functools import partial

import pytest
import torch
from communicators import CollectiveError, Dies, Elastic, SimulatedWorld, as_communicator
from sparse_collectives import (
    ALGORITHMS,
    Reduction,
    sparse_allreduce,
    sparse_allreduce_array_async,
    sparse_allreduce_async,
)
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_compress import SparseVector, topk

pytestmark = pytest.mark.quick

alone = as_communicator(None)


def test_one_rank_gets_its_input_back():
    sparse = topk(torch.tensor([0.0, -3.0, 2.0, 0.5]), 2)
    for name in ALGORITHMS:
        reduction = sparse_allreduce(sparse, alone, k=2, algorithm=name)
        assert isinstance(reduction, Reduction)
        assert torch.equal(reduction.total.to_dense(), sparse.to_dense())
        assert not len(reduction.dropped)


def test_fewer_entries_are_filled_up_with_zeros_at_the_lowest_unused_indices():
    sparse = topk(torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0]), 1)
    total = sparse_allreduce(sparse, alone, k=3).total
    assert total.indices.tolist() == [0, 1, 2]
    assert total.values.tolist() == [0, 0, 9]


def test_more_entries_are_cut_to_the_largest_and_the_cut_is_dropped():
    sparse = topk(torch.tensor([1.0, -5.0, 2.0, 4.0]), 4)
    reduction = sparse_allreduce(sparse, alone, k=2)
    assert reduction.total.to_dense().tolist() == [0, -5, 0, 4]
    assert reduction.dropped.to_dense().tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_over_ranks_takes_the_place_of_the_gradient(name, dtype):
    gradients = torch.randn(3, 4, 5, dtype=dtype)
    results = SimulatedWorld(3).run(
        lambda comm: sparse_allreduce(topk(gradients[comm.rank].flatten(), 7), comm, k=6, algorithm=name)
    )
    for gradient, result in zip(gradients, results, strict=True):
        assert torch.equal(result.mean(), result.total.to_dense() / 3)
        assert result.mean(out=gradient) is gradient
        assert torch.equal(gradient.flatten(), result.mean())


def test_the_mean_says_what_it_wants():
    result = sparse_allreduce(topk(torch.ones(3), 2), alone, k=2)
    with pytest.raises(ValueError, match="expected a contiguous tensor of its numel"):
        result.mean(out=torch.ones(4))
    with pytest.raises(ValueError, match=r"a mean is over size ranks.*give size="):
        Reduction(result.total, result.dropped).mean()


@pytest.mark.parametrize("call", [sparse_allreduce, lambda *a, **o: sparse_allreduce_async(*a, **o).wait()])
def test_ranks_of_one_process_may_give_the_same_vector(call):
    sparse = topk(torch.arange(8.0), 3)
    for name in ALGORITHMS:
        results = SimulatedWorld(4).run(lambda comm, name=name: call(sparse, comm, k=3, algorithm=name))
        dropped = sum(result.dropped.to_dense() for result in results)
        assert torch.equal(results[0].total.to_dense() + dropped, 4 * sparse.to_dense())


def test_k_beyond_the_vector_means_all_of_it():
    assert len(sparse_allreduce(topk(torch.ones(3), 2), alone, k=10).total) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"algorithm": "gtop"}, ValueError, f"unknown algorithm 'gtop'; known: {', '.join(ALGORITHMS)}"),
        ({"k": 0}, ValueError, "k is 0, expected the most entries"),
        ({"k": -1}, ValueError, "k is -1"),
        ({"k": 1.5}, TypeError, "integer"),
        ({"state": {}}, ValueError, "gtopk keeps no state"),
        ({"options": {"teams": 2}}, ValueError, "gtopk has no option teams; it takes: none"),
        (
            {"sparse": [1.0]},
            TypeError,
            r"sparse is list, expected a SparseVector, as topk\(tensor, k\) makes it; dense NumPy arrays",
        ),
        ({"sparse": SparseVector.empty(0)}, ValueError, "nothing to sum"),
        ({"comm": "world"}, TypeError, "communicator"),
    ],
)
@pytest.mark.parametrize("call", [sparse_allreduce, sparse_allreduce_async])
def test_wrong_arguments_are_told_before_anything_is_sent(call, arguments, error, says):
    arguments = {"sparse": topk(torch.ones(3), 1), "comm": alone, "k": 1, **arguments}
    with pytest.raises(error, match=says):
        call(**arguments)


def test_calls_in_flight_complete_in_any_order_even_of_one_input():
    values = torch.arange(24.0).view(3, 8)

    def body(comm):
        sparse = topk(values[comm.rank], 8)
        works = [sparse_allreduce_async(sparse, comm, k=8, algorithm=name) for name in [*ALGORITHMS, *ALGORITHMS]]
        sparse.values.zero_()  # the calls have copies
        return [work.wait().total.to_dense() for work in reversed(works)]

    for totals in SimulatedWorld(3, jitter=1e-3).run(body):
        assert all(torch.equal(total, values.sum(0)) for total in totals)


@pytest.mark.parametrize("name", ["oktopk", "spardl"])
@pytest.mark.parametrize("call", [sparse_allreduce_async, sparse_allreduce_array_async])
def test_a_state_serves_one_call_at_a_time(call, name):
    """Two at once would end in unlike phases on ranks whose calls end in another order."""

    def body(comm):
        state = ALGORITHMS[name].initial_state()
        x = torch.arange(8.0)
        settings = {"k": 4, "algorithm": name, "state": state}
        work = call(topk(x, 4) if call is sparse_allreduce_async else x, comm, **settings)
        for other in (sparse_allreduce, sparse_allreduce_async):
            with pytest.raises(ValueError, match="this state serves a call that is under way"):
                other(topk(x, 4), comm, **settings)
        work.wait()
        sparse_allreduce(topk(x, 4), comm, **settings)
        return state["step"]

    assert SimulatedWorld(2).run(body) == [2, 2]


def test_a_state_goes_on_after_a_call_that_has_failed():
    states = [ALGORITHMS["oktopk"].initial_state() for _ in range(2)]

    def body(comm):
        return sparse_allreduce(topk(torch.arange(8.0), 4), comm, k=4, algorithm="oktopk", state=states[comm.rank])

    with pytest.raises(CollectiveError) as error:
        SimulatedWorld(2, faults=[Dies(rank=1, message=1)]).run(body)
    SimulatedWorld(2).run(body)
    assert [state["step"] for state in states] == [1, 1]
    assert error  # whose frames hold the schedules of the calls that failed


def test_a_state_goes_on_where_others_go_on_without_a_rank():
    def body(comm):
        state, elastic = ALGORITHMS["spardl"].initial_state(), Elastic(comm)
        for _ in range(5):
            before = copy.deepcopy(state)
            call = partial(sparse_allreduce, topk(torch.arange(8.0), 4), elastic, k=4, algorithm="spardl", state=state)
            reduction = elastic.atomic(call, partial(state.update, before))
        return reduction.total.to_dense().sum().item() / elastic.size

    for message in range(1, 30):
        first, _, last = SimulatedWorld(3, faults=[Dies(rank=1, message=message)]).run(body)
        assert first == last > 0


def test_ranks_of_one_process_do_not_share_a_state():
    state = ALGORITHMS["spardl"].initial_state()

    def body(comm):
        sparse_allreduce(topk(torch.arange(8.0), 4), comm, k=4, algorithm="spardl", state=state)

    with pytest.raises(ValueError, match="and each rank, a state of its own"):
        SimulatedWorld(2).run(body)


def test_a_future_gives_the_reduction():
    sparse = topk(torch.ones(3), 3)

    def body(comm):
        return (
            sparse_allreduce_async(sparse, comm, k=3).get_future().then(lambda f: f.value().total.values.sum()).wait()
        )

    assert SimulatedWorld(2).run(body) == [6, 6]


def test_an_algorithm_with_state_gets_it_and_changes_it_in_place(monkeypatch):
    class Counting(GTopK):
        name = "counting"

        def schedule(self, sparse, rank, size, k, state=None):
            reduction = yield from super().schedule(sparse, rank, size, k)
            state["calls"] = state.get("calls", 0) + 1
            return reduction

        def initial_state(self):
            return {}

    monkeypatch.setitem(ALGORITHMS, "counting", Counting())

    def body(comm):
        state = {}
        for _ in range(3):
            sparse_allreduce(topk(torch.ones(4), 2), comm, k=2, algorithm="counting", state=state)
        sparse_allreduce(topk(torch.ones(4), 2), comm, k=2, algorithm="counting")
        return state

    assert SimulatedWorld(2).run(body) == [{"calls": 3}, {"calls": 3}]


def test_a_future_finds_the_tensors_of_a_reduction():
    """What torch does with a result on a GPU, to know which memory is in use on which stream."""
    total, dropped = topk(torch.randn(50), 7), topk(torch.randn(50), 3)
    tensors = torch._jit_internal._extract_tensors(Reduction(total, dropped))
    found = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert {total.pack().data_ptr(), dropped.pack().data_ptr()} <= found
