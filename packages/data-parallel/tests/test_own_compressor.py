"""A `DenseCompressor` of one's own, which sends something of every element, wherever an Algorithm may stand."""

from dataclasses import dataclass

import pytest
import torch
from communicators import Alone, CollectiveError, SimulatedWorld, schedules
from data_parallel import DenseCompressor, DistributedOptimizer, SparseHookState
from sparse_collectives import DenseReduction
from sparse_collectives.algorithms.gtopk import GTopK
from torch import nn


@dataclass(frozen=True)
class Rounded(DenseCompressor):
    """Gradients in steps of 1 / `per_unit`; what is rounded off waits for the next step."""

    name = "rounded"
    per_unit: int = 1

    def __post_init__(self):
        if self.per_unit < 1:
            raise ValueError(f"per_unit is {self.per_unit}, expected 1 or more")

    def schedule(self, accumulated, rank, size):
        sent = (accumulated * self.per_unit).round() / self.per_unit
        total = yield from schedules.allreduce(sent, rank, size)
        return DenseReduction(total, accumulated - sent)


class Alternating(Rounded):
    """Coarser in every other step of those that stand."""

    name = "alternating"

    def initial_state(self, numel):
        return {"steps": 0, "numel": numel}

    def schedule(self, accumulated, rank, size, state):
        sent = (accumulated / (1 + state["steps"] % 2)).round() * (1 + state["steps"] % 2)
        total = yield from schedules.allreduce(sent, rank, size)
        state["steps"] += 1
        return DenseReduction(total, accumulated - sent)


ROUNDED = Rounded()


def named(name, **methods):
    return type("Mine", (Rounded,), {"name": name, **methods})()


def train(comm, steps, *, algorithm=ROUNDED, saved=None, bad=(), **options):
    """Σ of its gradients, −P · parameters, its residual; the optimizer's state and the model's."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(5, 3)), "b": nn.Parameter(torch.zeros(7))})
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, algorithm=algorithm, **options)
    if saved is not None:
        optimizer.load_state_dict(saved[3])
        model.load_state_dict(saved[4])
    given = torch.zeros(22)
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        gradient = torch.randint(-99, 100, (22,), generator=generator) / 4
        if step in bad and comm.rank == comm.size - 1:
            gradient[20] = torch.inf
        elif step not in bad:
            given += gradient
        model["a"].grad, model["b"].grad = gradient[:15].view(5, 3), gradient[15:]
        optimizer.step()
    state = optimizer.state_dict()
    applied, rest = (
        [tensors[name].detach().view(-1) for name in "ab"] for tensors in (model, state["distributed"]["residuals"])
    )
    return given, -comm.size * torch.cat(applied), torch.cat(rest), state, dict(model.state_dict())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"bucket_bytes": 24}, {"options": {"per_unit": 2}}, {"algorithm": Alternating()}],
    ids=str,
)
def test_nothing_is_lost_and_all_agree(size, options):
    results = SimulatedWorld(size).run(lambda comm: train(comm, range(5), **options))
    given, rests = (sum(result[i] for result in results) for i in (0, 2))
    assert rests.any()
    for _, applied, *_ in results:
        assert torch.equal(given, applied + rests)


@pytest.mark.parametrize("own", [ROUNDED, Alternating()], ids=lambda own: own.name)
def test_a_resumed_run_has_the_same_bits_and_a_skipped_step_leaves_no_trace(own):
    def run(steps, saved=None, bad=()):
        given = {"algorithm": own, "bad": bad, "nonfinite": "skip"}
        return SimulatedWorld(3).run(lambda comm: train(comm, steps, saved=saved and saved[comm.rank], **given))

    whole, resumed, skipping = run(range(5)), run(range(2, 5), run(range(2))), run([0, 9, *range(1, 5)], bad={9})
    for one, *others in zip(whole, resumed, skipping, strict=True):
        assert one[3]["distributed"]["algorithm"] == own.name
        for other in others:
            assert torch.equal(one[1], other[1])
            assert torch.equal(one[2], other[2])


def test_errors_name_the_rank_and_the_settings_of_the_others():
    def told(**options):
        def body(comm):
            with pytest.raises(CollectiveError) as error:
                train(
                    comm, [0], bad={0}, algorithm=ROUNDED, **{key: given[comm.rank] for key, given in options.items()}
                )
            return str(error.value)

        [text] = set(SimulatedWorld(2).run(body))
        return text

    assert "rank 1: the gradient of 'b' is not finite" in told()
    assert "per_unit=3" in told(options=[{}, {"per_unit": 3}])


def test_the_hook_takes_it():
    state = SparseHookState(Alone(), algorithm=named("mine"))
    assert state.algorithm == "mine"


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"algorithm": named("gtopk")}, ValueError, "'gtopk', which is another's"),
        ({"algorithm": named("powersgd")}, ValueError, "'powersgd', which is another's"),
        ({"algorithm": named(3)}, TypeError, "name of Mine is 3, expected text"),
        ({"algorithm": named("")}, ValueError, "Mine has no name: give it one"),
        ({"algorithm": Rounded}, TypeError, r"the class Rounded, expected one of it, as Rounded\(\)"),
        ({"algorithm": named("mine", schedule=DenseCompressor.schedule)}, TypeError, "Mine has no schedule"),
        ({"algorithm": ROUNDED, "options": {"k": 1}}, ValueError, "rounded has no option k; it takes: per_unit"),
        ({"algorithm": ROUNDED, "options": {"per_unit": 0.5}}, TypeError, "per_unit is 0.5"),
        ({"algorithm": ROUNDED, "options": {"per_unit": 0}}, ValueError, "expected 1 or more"),
        ({"algorithm": ROUNDED, "wire": "bf16"}, ValueError, "rounded has a wire of its own"),
        ({"algorithm": ROUNDED, "momentum": 0.9}, ValueError, "rounded selects nothing"),
        ({"algorithm": type("Mine", (GTopK,), {"name": "powersgd"})()}, ValueError, "'powersgd', which is another's"),
        (
            {"algorithm": type("Mine", (GTopK,), {"name": "mine", "selects": False})()},
            ValueError,
            "is a DenseCompressor",
        ),
    ],
)
def test_what_cannot_be_used(settings, error, says):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(error, match=says):
        DistributedOptimizer(inner, model.named_parameters(), comm=Alone(), **settings)
    with pytest.raises(error, match=says):
        SparseHookState(Alone(), **settings)
