"""A scheme of one's own that sends something of every element: a `WholeScheme`, wherever an Algorithm may stand."""

from dataclasses import dataclass, replace

import pytest
import torch
from communicators import Alone, CollectiveError, SimulatedWorld, schedules
from data_parallel import DistributedOptimizer, Residuals, SparseHookState, WholeScheme
from sparse_collectives.algorithms.gtopk import GTopK
from torch import nn


class Rounded:
    """Gradients in steps of 1 / `per_unit`; what is rounded off waits for the next step."""

    keeps = ("residuals",)

    def __init__(self, comm, *, per_unit=1):
        self.comm, self.per_unit, self.residuals, self.facts = comm, per_unit, Residuals(), {}

    def register(self, key, bucket, kept):
        self.residuals.register(key, kept)
        self.facts[key] = f"rounded(numel={bucket.numel}, per_unit={self.per_unit})"

    def forget(self, key):
        del self.facts[key]
        return self.residuals.forget(key)

    def transfer(self, key, flat, scale, unused):
        total = self.residuals.accumulated(key, flat / scale, unused)
        return OnItsWay(self, key, total, (total * self.per_unit).round() / self.per_unit, scale, unused)

    def commit(self):
        self.residuals.commit()

    def rollback(self):
        self.residuals.rollback()

    def kept(self):
        return self.residuals.kept()

    def state_dict(self):
        return {"algorithm_state": []}

    def reset(self, state):
        self.residuals.reset(state)
        self.facts = {}


@dataclass
class OnItsWay:
    scheme: Rounded
    key: str
    total: torch.Tensor
    summed: torch.Tensor
    scale: float
    unused: list

    @property
    def facts(self):
        return self.scheme.facts[self.key]

    @property
    def schedule(self):
        return schedules.allreduce(self.summed, self.scheme.comm.rank, self.scheme.comm.size)

    def agreed(self, result):
        return result

    def own(self, result):
        return result[:0]

    def suspect(self):
        bad = (~self.total.isfinite()).nonzero()
        return int(bad[0]) if len(bad) else -1

    def end(self, result, flat):
        self.scheme.residuals.put(self.key, self.total - self.summed, self.unused)
        mean = result / self.scheme.comm.size * self.scale
        return mean, mean


ROUNDED = WholeScheme(Rounded, options={"per_unit": 1})


def positive(per_unit):
    if per_unit < 1:
        raise ValueError(f"per_unit is {per_unit}, expected 1 or more")


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
    "options", [{}, {"overlap": True}, {"bucket_bytes": 24}, {"options": {"per_unit": 2}}], ids=str
)
def test_nothing_is_lost_and_all_agree(size, options):
    results = SimulatedWorld(size).run(lambda comm: train(comm, range(5), **options))
    given, rests = (sum(result[i] for result in results) for i in (0, 2))
    assert rests.any()
    for _, applied, *_ in results:
        assert torch.equal(given, applied + rests)


def test_a_resumed_run_has_the_same_bits_and_a_skipped_step_leaves_no_trace():
    def run(steps, saved=None, bad=()):
        return SimulatedWorld(3).run(
            lambda comm: train(comm, steps, saved=saved and saved[comm.rank], bad=bad, nonfinite="skip")
        )

    whole, resumed, skipping = run(range(5)), run(range(2, 5), run(range(2))), run([0, 9, *range(1, 5)], bad={9})
    for one, *others in zip(whole, resumed, skipping, strict=True):
        assert one[3]["distributed"]["algorithm"] == "Rounded"
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
    state = SparseHookState(Alone(), algorithm=replace(ROUNDED, name="mine"))
    assert (state.algorithm, state.entry) == ("mine", None)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"algorithm": replace(ROUNDED, name="gtopk")}, ValueError, "'gtopk', which is another's"),
        ({"algorithm": replace(ROUNDED, name="powersgd")}, ValueError, "'powersgd', which is another's"),
        ({"algorithm": replace(ROUNDED, name=3)}, TypeError, "name is 3, expected text"),
        ({"algorithm": WholeScheme(lambda comm: Rounded(comm))}, ValueError, "no name: give it one"),
        ({"algorithm": WholeScheme(None, name="mine")}, TypeError, "make is None, expected a function"),
        ({"algorithm": ROUNDED, "options": {"k": 1}}, ValueError, "Rounded has no option k; it takes: per_unit"),
        ({"algorithm": ROUNDED, "options": {"per_unit": 0.5}}, TypeError, "per_unit is 0.5"),
        ({"algorithm": replace(ROUNDED, check=positive), "options": {"per_unit": 0}}, ValueError, "expected 1 or more"),
        ({"algorithm": ROUNDED, "wire": "bf16"}, ValueError, "Rounded has a wire of its own"),
        ({"algorithm": ROUNDED, "momentum": 0.9}, ValueError, "Rounded selects nothing"),
        ({"algorithm": type("Mine", (GTopK,), {"name": "powersgd"})()}, ValueError, "'powersgd', which is another's"),
        ({"algorithm": type("Mine", (GTopK,), {"name": "mine", "selects": False})()}, ValueError, "is a WholeScheme"),
    ],
)
def test_what_cannot_be_used(settings, error, says):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(error, match=says):
        DistributedOptimizer(inner, model.named_parameters(), comm=Alone(), **settings)
    with pytest.raises(error, match=says):
        SparseHookState(Alone(), **settings)
