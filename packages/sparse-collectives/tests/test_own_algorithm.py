"""An Algorithm, and a compressor, of one's own: used wherever ours are, and called by its own name."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from communicators import Alone, CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, SparseHookState
from sparse_collectives import (
    WIRES,
    Algorithm,
    Reduction,
    sparse_allreduce,
    sparse_allreduce_array,
    sparse_allreduce_async,
)
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_collectives.algorithms.table import resolve
from sparse_collectives.algorithms.topk_allgather import TopKAllgather
from sparse_collectives.testing import SHAPES, SIZES, _examples, check_sparse_call, check_sparse_laws
from sparse_compress import SparseVector, topk
from torch import nn

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Counting(Algorithm):
    """gTop-k, which counts its calls."""

    name = "counting"
    twice: bool = False

    def schedule(self, sparse, rank, size, k, state=None):
        reduction = yield from GTopK().schedule(sparse, rank, size, k)
        state["calls"] += 1 + self.twice
        return reduction

    def sent(self, rank, size, k, numel, dtype):
        return GTopK().sent(rank, size, k, numel, dtype)

    def initial_state(self):
        return {"calls": 0}


class Losing(GTopK):
    """Forgets what gTop-k drops."""

    name = "losing"

    def schedule(self, sparse, rank, size, k, state=None):
        reduction = yield from super().schedule(sparse, rank, size, k)
        return Reduction(reduction.total, SparseVector.empty(sparse.numel, sparse.dtype))


class Silent(TopKAllgather):
    """Makes 0 of what is not finite."""

    name = "silent"

    def schedule(self, sparse, rank, size, k, state=None):
        reduction = yield from super().schedule(sparse, rank, size, k)
        return Reduction(topk(reduction.total.to_dense().nan_to_num(0, 0, 0), k * size), reduction.dropped)


class TooFew(GTopK):
    """Says that it sends what another does."""

    name = "too few"

    def sent(self, rank, size, k, numel, dtype):
        return TopKAllgather().sent(rank, size, k, numel, dtype)


class More(GTopK):
    """Sends more than it says is the most."""

    name = "more"
    exact = False

    def sent(self, rank, size, k, numel, dtype):
        return super().sent(0, 2, 1, 1, torch.float32)


class Other(GTopK):
    """Has a reference that sums."""

    name = "other"

    def reference(self, inputs, k):
        return sum(inputs)


class Deaf(TopKAllgather):
    """Sends the same on every wire."""

    name = "deaf"

    def schedule(self, sparse, rank, size, k, state=None):
        return TopKAllgather().schedule(sparse, rank, size, k, state)

    def sent(self, rank, size, k, numel, dtype):
        return TopKAllgather().sent(rank, size, k, numel, dtype)


class Narrow(GTopK):
    """Adds in float32, whatever was given."""

    name = "narrow"

    def schedule(self, sparse, rank, size, k, state=None):
        reduction = yield from super().schedule(sparse, rank, size, k)
        reduction.total.values.copy_(reduction.total.values.float())
        return reduction


def selecting(selection):
    """gTop-k with this selection."""
    return called("selecting", GTopK, select=lambda self, like, rank, size, k, state: selection)


def called(name, kind=Counting, **more):
    """A class of that name."""
    return type("Called", (kind,), {"name": name, **more})()


COUNTING = Counting()


@pytest.mark.parametrize("call", [sparse_allreduce, lambda *a, **named: sparse_allreduce_async(*a, **named).wait()])
def test_a_call(call):
    states = [COUNTING.initial_state() for _ in range(3)]
    vectors = [topk(torch.arange(9.0) * (rank - 1), 3) for rank in range(3)]

    def body(comm):
        options = {"algorithm": COUNTING, "options": {"twice": True}, "state": states[comm.rank]}
        return call(vectors[comm.rank], comm, k=3, **options).total.to_dense()

    expected = SimulatedWorld(3).run(lambda comm: call(vectors[comm.rank], comm, k=3).total.to_dense())
    assert all(map(torch.equal, SimulatedWorld(3).run(body), expected))
    assert states == [{"calls": 2}] * 3


def test_an_array():
    [result] = SimulatedWorld(1).run(lambda comm: sparse_allreduce_array(torch.ones(4), comm, k=2, algorithm=COUNTING))
    assert result.total.tolist() == [1, 1, 0, 0]


def test_facts_and_errors_name_it():
    def body(comm):
        with pytest.raises(CollectiveError) as error:
            sparse_allreduce(topk(torch.ones(9), 3), comm, k=3 + comm.rank, algorithm=called("mine"))
        return str(error.value)

    [told] = set(SimulatedWorld(2).run(body))
    assert "mine(numel=9" in told


def train(comm, algorithm, compressor=None, saved=None):
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(30))})
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(
        inner, model.named_parameters(), comm=comm, algorithm=algorithm, compressor=compressor
    )
    if saved is not None:
        optimizer.load_state_dict(saved)
    for step in range(3):
        model["w"].grad = torch.randn(30, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        optimizer.step()
    return model["w"].detach(), optimizer.state_dict()


def test_the_optimizer_trains_with_it_and_saves_its_state():
    ours = SimulatedWorld(3).run(lambda comm: train(comm, "gtopk")[0])
    results = SimulatedWorld(3).run(lambda comm: train(comm, COUNTING))
    assert all(torch.equal(mine, known) for (mine, _), known in zip(results, ours, strict=True))
    own = results[0][1]["distributed"]
    assert (own["algorithm"], own["algorithm_state"]) == ("counting", [("w", {"calls": 3})])
    again = SimulatedWorld(3).run(lambda comm: train(comm, COUNTING, saved=results[comm.rank][1]))
    assert again[0][1]["distributed"]["algorithm_state"] == [("w", {"calls": 6})]


def test_the_hook_takes_it():
    state = SparseHookState(Alone(), algorithm=COUNTING)
    assert state.algorithm == "counting"


class EveryOther:
    """A compressor of one's own: k elements of even index."""

    def entries(self, numel):
        return max(1, numel // 10)

    def __call__(self, tensor):
        at = torch.arange(0, tensor.numel(), 2, dtype=torch.int32)[: self.entries(tensor.numel())]
        return SparseVector(at, tensor.reshape(-1)[at.long()], tensor.numel())


def test_a_compressor_of_ones_own():
    (model, state), *_ = SimulatedWorld(2).run(lambda comm: train(comm, "topk-allgather", EveryOther()))
    assert model.nonzero().view(-1).tolist() == [0, 2, 4]
    assert state["distributed"]["residuals"]["w"].count_nonzero() == 27
    assert isinstance(SparseHookState(Alone(), compressor=EveryOther()).compressor, EveryOther)


class Unsent(Algorithm):
    """Does not say what it sends."""

    name = "unsent"
    schedule = Counting.schedule


@pytest.mark.parametrize(
    ("algorithm", "wire", "error", "says"),
    [
        (called("gtopk"), "fp32", ValueError, "'gtopk', which is another's"),
        (called("auto"), "fp32", ValueError, "'auto', which is another's"),
        (called("gtopk", GTopK, exact=False), "fp32", ValueError, "'gtopk', which is another's"),
        (called(""), "fp32", ValueError, "is '', expected text"),
        (called(3), "fp32", ValueError, "is 3, expected text"),
        (called("whole", selects=False), "fp32", ValueError, "selects=False"),
        (
            called("made", __init__=lambda self: None),
            "fp32",
            TypeError,
            "Called has an __init__ of its own.*frozen=True",
        ),
        (
            called("bare", __annotations__={"q": int}, q=2),
            "fp32",
            TypeError,
            "Called declares q as no field.*frozen=True",
        ),
        (called("kept", initial_state=lambda self, kept={"calls": 0}: kept), "fp32", TypeError, "expected a new dict"),
        (
            called("count", initial_state=lambda self: 3),
            "fp32",
            TypeError,
            "returns 3 at each call, expected a new dict",
        ),
        (COUNTING, "bf16", ValueError, "counting sends values as they are"),
        (Counting, "fp32", TypeError, "the class Counting, expected one of it"),
        (Counting.schedule, "fp32", TypeError, "or an Algorithm of your own"),
    ],
)
def test_what_cannot_be_used(algorithm, wire, error, says):
    sparse, inner = topk(torch.ones(9), 3), nn.Linear(2, 2)
    with pytest.raises(error, match=says):
        SimulatedWorld(2).run(lambda comm: sparse_allreduce(sparse, comm, k=3, algorithm=algorithm, wire=wire))
    with pytest.raises(error, match=says):
        SparseHookState(Alone(), algorithm=algorithm, wire=wire)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1.0)
    with pytest.raises(error, match=says):
        DistributedOptimizer(optimizer, inner.named_parameters(), comm=Alone(), algorithm=algorithm, wire=wire)


def test_a_name_that_is_not_ours_says_how_to_give_ones_own():
    with pytest.raises(ValueError, match=r"unknown algorithm 'mine'.*of your own give the Algorithm itself"):
        resolve("mine")


def test_one_that_does_not_say_what_it_sends():
    with pytest.raises(TypeError, match=r"Unsent .*sent"):
        Unsent()


@pytest.mark.parametrize("schedule", [lambda *given: None, lambda *given: iter([])])
def test_a_schedule_that_is_none(schedule):
    with pytest.raises(TypeError, match="expected a generator"):
        sparse_allreduce(topk(torch.ones(9), 3), Alone(), k=3, algorithm=called("none", GTopK, schedule=schedule))


def test_the_laws_hold_of_one_with_a_state():
    check_sparse_laws(COUNTING, sizes=(1, 2, 3))


@pytest.mark.parametrize("most", [1, 20, 40])
def test_fewer_examples_leave_out_no_size_wire_or_shape(most):
    entries = {size: resolve("gtopk", size=size) for size in SIZES}
    every, some = _examples(entries, None), _examples(entries, most)
    assert set(some) < set(every)
    assert len(some) == len(set(some)) <= max(most, len(SIZES) + len(WIRES) + len(SHAPES))
    for part in (lambda case: case[0], lambda case: case[1], lambda case: case[2:]):
        assert set(map(part, some)) == set(map(part, every))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Losing(), "conservation"),
        (Narrow(), r"torch\.float64: conservation"),
        (Silent(), "not finite"),
        (TooFew(), "rounds|bytes"),
        (More(), "rounds|bytes"),
        (Other(), "reference"),
        (Deaf(), "wires: .* bytes on .*must use self.wire"),
        (called("scalar", initial_state=lambda self: {"calls": np.int64(0)}), r"weights_only=True\) refuses "),
        (selecting(lambda x: SparseVector.empty(len(x))), "select returned no entry on any"),
        (selecting(lambda x: topk(x, len(x))), "select returned .* entries at most"),
    ],
)
def test_the_laws_find_what_is_wrong(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_sparse_laws(wrong, sizes=(3,))


def test_the_laws_of_a_call_are_told_of_wrong_bytes():
    with pytest.raises(AssertionError, match="bytes"):
        check_sparse_call(TooFew(), [topk(torch.ones(9), 3)] * 3, k=3)


def test_laws_that_check_nothing():
    for nothing in ({"sizes": ()}, {"sizes": 4}, {"max_examples": 0}):
        with pytest.raises(ValueError, match="check nothing"):
            check_sparse_laws("gtopk", **nothing)


def test_a_broken_law_names_its_example_and_the_first_difference():
    says = r"^losing, 3 ranks, n=\d+, k=\d+, wire=.*, torch\.float\d+: conservation: .* differ, element \d+ is"
    with pytest.raises(AssertionError, match=says):
        check_sparse_laws(Losing(), sizes=(3,))
    with pytest.raises(AssertionError, match=r"sent returned \(0, 0, 0\), expected a Traffic"):
        check_sparse_laws(called("plain", GTopK, sent=lambda *given: (0, 0, 0)), sizes=(3,))


def returning(**parts):
    """An algorithm that returns these in place of what gTop-k does."""

    def schedule(self, sparse, rank, size, k, state=None):
        reduction = yield from GTopK().schedule(sparse, rank, size, k)
        return replace(reduction, **parts)

    return called("returning", GTopK, schedule=schedule)


@pytest.mark.parametrize(
    "parts",
    [
        {"total": SparseVector.empty(14)},
        {"total": SparseVector.empty(9, torch.float64)},
        {"total": torch.ones(9)},
        {"dropped": None},
        {"dropped": SparseVector.empty(3)},
    ],
    ids=str,
)
def test_vectors_of_another_kind_are_refused_on_every_rank(parts):
    def body(comm):
        with pytest.raises(CollectiveError, match=r"returned Reduction.*, expected .* SparseVectors of numel=9"):
            sparse_allreduce(topk(torch.ones(9), 3), comm, k=3, algorithm=returning(**parts))
        return True

    assert SimulatedWorld(2).run(body) == [True, True]


@dataclass(frozen=True)
class Slack(GTopK):
    """Has an option with a float for a default."""

    name = "slack"
    slack: float = 1.0


def test_options_have_the_type_of_their_default():
    assert Slack(slack=2).facts() == Slack(slack=2.0).facts() == resolve(Slack(), {"slack": 2}).facts()
    for wrong in (True, "1", None, float("nan")):
        for make in (lambda given: Slack(slack=given), lambda given: resolve(Slack(), {"slack": given})):
            with pytest.raises((TypeError, ValueError), match=r"slack is .*, expected a number, as 1.0, the default"):
                make(wrong)


class Aging(Counting):
    """Calls its counter "step"."""

    name = "aging"

    def schedule(self, sparse, rank, size, k, state=None):
        reduction = yield from GTopK().schedule(sparse, rank, size, k)
        state["step"] += 1
        return reduction

    def initial_state(self):
        return {"step": 0}


@pytest.mark.parametrize("algorithm", [Aging(), "oktopk", "spardl"])
@pytest.mark.parametrize("call", [sparse_allreduce, sparse_allreduce_array])
def test_states_of_unlike_age_are_told(algorithm, call):
    def body(comm):
        sparse = topk(torch.ones(9), 3)
        given = sparse if call is sparse_allreduce else torch.ones(9)
        state = resolve(algorithm).initial_state()
        for _ in range(5):
            sparse_allreduce(sparse, comm, k=3, algorithm=algorithm, state=state)
        with pytest.raises(CollectiveError, match=r"state=(new|of 4 to 7 calls)"):
            call(given, comm, k=3, algorithm=algorithm, state=None if comm.rank else state)
        return state["step"]

    assert SimulatedWorld(2).run(body) == [5, 5]


def test_a_state_that_lacks_a_key_is_refused():
    with pytest.raises(ValueError, match=r"keys \['stp'\], expected \['step'\]"):
        sparse_allreduce(topk(torch.ones(9), 3), Alone(), k=3, algorithm=Aging(), state={"stp": 0})
