"""algorithm="auto": the same choice everywhere, dense where dense is faster, remembered where the caller says."""

import logging
import random
import threading

import pytest
import torch
from communicators import Alone, Link, SimulatedWorld, as_communicator
from data_parallel import DistributedOptimizer, SparseHookState
from sparse_collectives import ALGORITHMS, choose, sparse_allreduce
from sparse_collectives.algorithms.table import resolve
from sparse_collectives.prediction.auto import _reason
from sparse_collectives.prediction.calibration import measure_handling
from sparse_collectives.prediction.cost import Handling, Prediction
from sparse_compress import TopK, topk

pytestmark = pytest.mark.quick

SLOW, FAST = Link(1e-4, 1e-6), Link(1e-4, 1e-12)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_agree_although_each_measured_something_else(size):
    def body(comm):
        own = Handling(compress=1e-9 * (comm.rank + 1), merge=dict.fromkeys(ALGORITHMS, 1e-8 * (size - comm.rank)))
        return choose(comm, numel=10**5, k=1000, handling=own)

    choices = SimulatedWorld(size, link=SLOW).run(body)
    assert all(choice == choices[0] for choice in choices)
    [best] = [
        p for p in choices[0].predictions if (p.algorithm, p.options) == (choices[0].algorithm, choices[0].options)
    ]
    assert best.compression == pytest.approx(1e-9 * size * 10**5)  # the slowest rank's
    assert set(ALGORITHMS) == {p.algorithm for p in choices[0].predictions}


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(5))
def test_ranks_agree_on_busy_machines(monkeypatch, seed):
    """Whatever time each measurement takes on each rank; costs that were given may be in any order."""

    def body(comm):
        rng, names = random.Random(f"{seed} {comm.rank}"), list(ALGORITHMS)

        def noisy(call, comm, device):
            call()
            return rng.expovariate(1e3)

        noise[threading.get_ident()] = noisy
        rng.shuffle(names)
        merge = {name: rng.expovariate(1e7) for name in names}
        own = Handling(rng.expovariate(1e8), {"spardl": rng.expovariate(1e8), "oktopk": 1e-9}, merge)
        return choose(comm, numel=10**5, k=1000, handling=own), choose(comm, numel=10**4, k=100)

    noise = {}
    seconds_of = "sparse_collectives.prediction.calibration.seconds_of"
    monkeypatch.setattr(seconds_of, lambda *given: noise[threading.get_ident()](*given))
    choices = SimulatedWorld(5, link=SLOW).run(body)
    assert all(choice == choices[0] for choice in choices)
    assert len({p.seconds for choice in choices[0] for p in choice.predictions}) > len(ALGORITHMS)


def test_dense_when_dense_is_faster_said_plainly():
    def body(comm):
        return choose(
            comm, numel=10**6, k=1000, handling=Handling(compress=1e-8, merge=dict.fromkeys(ALGORITHMS, 1e-8))
        )

    choice = SimulatedWorld(4, link=FAST).run(body)[0]
    assert choice.algorithm == "dense"
    assert "leave it off" in str(choice)
    assert choice.predictions[0].algorithm == "dense"


def test_sparse_over_a_slow_link_with_a_table():
    choice = SimulatedWorld(4, link=SLOW).run(lambda comm: choose(comm, numel=10**5, k=100))[0]
    assert ALGORITHMS[choice.algorithm].selects
    header, *rows, reason = str(choice).splitlines()
    assert header.split() == ["algorithm", "sent", "rounds", "compression", "network", "merging", "ms"]
    assert [row.split()[0] for row in rows] == [p.algorithm for p in choice.predictions]
    assert reason.startswith(f"{choice.predictions[0].variant} is the fastest")


def test_no_elements_are_named():
    with pytest.raises(ValueError, match="numel is 0"):
        choose(as_communicator(None), numel=0, k=1)


def test_one_rank_needs_no_compression():
    assert choose(as_communicator(None), numel=1000, k=10, handling=Handling(1e-9)).algorithm == "dense"


def test_sparse_allreduce_measures_once_and_remembers_in_its_state():
    gradients = torch.randint(-9, 10, (4, 500)).float()

    def body(comm):
        state, sent = {}, []
        for _ in range(3):
            before = comm.bytes_sent
            reduction = sparse_allreduce(topk(gradients[comm.rank], 5), comm, k=5, algorithm="auto", state=state)
            sent.append(comm.bytes_sent - before)
        return reduction, state, sent

    results = SimulatedWorld(4, link=SLOW).run(body)
    [remembered] = results[0][1].values()
    entry = resolve(remembered["algorithm"], remembered["options"], size=4)
    expected = entry.sent(0, 4, 5, 500, torch.float32).nbytes
    given = sum(topk(gradient, 5).to_dense() for gradient in gradients)
    dropped = sum(reduction.dropped.to_dense() for reduction, _, _ in results)
    assert torch.equal(results[0][0].total.to_dense() + dropped, given)
    for reduction, state, sent in results:
        assert torch.equal(reduction.total.to_dense(), results[0][0].total.to_dense())
        assert state == results[0][1]
        assert sent[0] > 2**20
        assert sent[1:] == [expected, expected]


def test_without_a_state_the_call_says_what_to_do():
    with pytest.raises(ValueError, match="give a state"):
        sparse_allreduce(topk(torch.ones(9), 2), None, k=2, algorithm="auto")


def test_teams_are_chosen_too():
    """Three teams of one: two messages as in an allgather, with a third of its bytes."""

    def body(comm):
        sgd = torch.optim.SGD((model := linear()).parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), comm=comm, algorithm="auto")
        before = comm.messages_sent
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        by_step, state = comm.messages_sent - before, {}
        for _ in range(2):
            before = comm.messages_sent
            sparse_allreduce(topk(torch.ones(5050), 50), comm, k=50, algorithm="auto", state=state)
            by_call = comm.messages_sent - before
        hook = SparseHookState(comm, algorithm="auto", named_parameters=model.named_parameters())
        return optimizer.choice, by_step, by_call, hook.choice.options

    choice, by_step, by_call, of_hook = SimulatedWorld(3, link=SLOW).run(body)[0]
    assert (choice.algorithm, choice.options, by_step) == ("spardl", {"teams": 3}, 2)
    assert (by_call, of_hook["teams"]) == (2, 3)
    assert {p.options["teams"] for p in choice.predictions if p.algorithm == "spardl"} == {1, 3}
    assert "spardl teams=3" in str(choice)


def test_options_belong_to_a_named_algorithm():
    """Whether they fit what is chosen would depend on the link."""
    options, named = {"teams": 2}, list(linear().named_parameters())
    sgd = torch.optim.SGD([p for _, p in named], lr=0.1)
    for call in (
        lambda: sparse_allreduce(topk(torch.ones(9), 2), None, k=2, algorithm="auto", state={}, options=options),
        lambda: DistributedOptimizer(sgd, named, algorithm="auto", options=options),
        lambda: SparseHookState(algorithm="auto", named_parameters=named, options=options),
    ):
        with pytest.raises(ValueError, match=r"chooses options too, but \{'teams': 2\} was given"):
            call()


def linear():
    return torch.nn.Linear(100, 50)


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["slow", "fast"])
def test_optimizer_by_name(link):
    def body(comm):
        model = linear()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), comm=comm, algorithm="auto")
        model(torch.randn(8, 100)).sum().backward()
        optimizer.step()
        return optimizer.choice, optimizer.state_dict()["distributed"]["algorithm"], model.weight.detach().clone()

    results = SimulatedWorld(2, link=link).run(body)
    choice, name, weight = results[0]
    assert (choice.algorithm, choice) == (name, results[1][0])
    assert torch.equal(weight, results[1][2])
    assert choice.predictions[0].numel == 5050


def test_momentum_before_the_selection_needs_one(caplog):
    fastest_is_dense = Link(1e-2, 0.0)

    def body(comm):
        model = linear()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        named = model.named_parameters()
        return DistributedOptimizer(sgd, named, comm=comm, algorithm="auto", compressor=TopK(0.5), momentum=0.9).choice

    with caplog.at_level(logging.WARNING, logger="sparse_collectives"):
        choice = SimulatedWorld(3, link=fastest_is_dense).run(body)[0]
    assert ALGORITHMS[choice.algorithm].selects
    if not ALGORITHMS[choice.predictions[0].algorithm].selects:
        assert "momentum" in choice.reason
        assert "leave compression off" in caplog.text


@pytest.mark.parametrize(("ranks", "level"), [(1, logging.INFO), (2, logging.WARNING)])
def test_dense_instead_of_a_selection_is_a_warning_where_anything_is_sent(ranks, level, caplog):
    def body(comm):
        sgd, everything = torch.optim.SGD((model := linear()).parameters(), lr=0.1), TopK(1.0)
        named = model.named_parameters()
        return DistributedOptimizer(sgd, named, comm=comm, algorithm="auto", compressor=everything).choice.algorithm

    with caplog.at_level(logging.INFO, logger="data_parallel"):
        assert set(SimulatedWorld(ranks, link=SLOW).run(body)) == {"dense"}
    assert [said.levelno for said in caplog.records if said.msg.startswith("algorithm auto")] == [level]


def test_hook_needs_the_parameters_to_choose():
    with pytest.raises(ValueError, match="named_parameters"):
        SparseHookState(algorithm="auto")
    state = SparseHookState(algorithm="auto", named_parameters=linear().named_parameters())
    assert state.algorithm == state.choice.algorithm == "dense"


@pytest.mark.parametrize(
    ("seconds", "said"), [(1e-3, "gtopk is the fastest, spardl comes next"), (9e-4, "spardl is f")]
)
def test_only_what_takes_less_is_called_faster(seconds, said):
    """A tie goes to the one that is taken, which need not be the fastest where momentum excludes others."""
    costs = {"compression": 0.0, "transfer": 0.0, "merging": 0.0, "nbytes": 800, "rounds": 1}
    taken, other = (
        Prediction(name, 1000, 0.1, "fp32", latency=latency, **costs)
        for name, latency in (("gtopk", 1e-3), ("spardl", seconds))
    )
    assert _reason(taken, [taken, other]).startswith(said)


def test_handling_is_measured_in_float32_whatever_torchs_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        handling = measure_handling(Alone(), numel=1000, density=0.1, device=torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert handling.compress > 0
