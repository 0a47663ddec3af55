"""Fewer bytes: what is sent and what stays are what was given, and ranks agree bit for bit."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, allreduce
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import BMUF, DiLoCo, LocalSGD
from sparse_compress import ErrorFeedback, TopK

pytestmark = pytest.mark.quick

N, STEPS = 2500, 12


@dataclass
class Sum:
    total: Any
    dropped: Any


class Halves:
    """Sends what is larger than the mean square, dense; the rest stays."""

    def __init__(self):
        self.rests = {}

    def compress(self, name, delta):
        kept = self.rests.get(name, torch.zeros_like(delta)) + delta
        sent = torch.where(kept.square() > kept.square().mean(), kept, 0)
        self.rests[name] = kept - sent
        return sent

    def restore(self, name, dropped):
        self.rests[name] += dropped

    def state_dict(self):
        return dict(self.rests)

    def load_state_dict(self, state):
        self.rests = {name: rest.clone() for name, rest in state.items()}


def dropping(sent, comm):
    """Rank 0's first element is dropped."""
    dropped = torch.zeros_like(sent)
    if comm.rank == 0:
        dropped[0] = sent[0]
    return Sum(allreduce(sent - dropped, comm, native=False), dropped)


def sparse():
    return {"compress": Halves(), "allreduce": dropping}


ways = pytest.mark.parametrize(
    "way",
    [lambda: {"compress": "int8"}, lambda: {"compress": "int4"}, lambda: {"compress": "int2"}, sparse],
    ids=["int8", "int4", "int2", "sparse"],
)
classes = pytest.mark.parametrize("algorithm", [LocalSGD, DiLoCo])


def rests(optimizer):
    """As one vector."""
    state = optimizer.state_dict()["distributed"]["residuals"]
    tensors = state["parts"]["sparsifier"] if state["kind"] == "sparse" else state["parts"]
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).clone() if tensors else torch.zeros(N)


class Drifting:
    """One parameter of a rank, whose gradients are noise."""

    def __init__(self, comm, algorithm, *, dtype=torch.float64, **options):
        self.p = torch.nn.Parameter(torch.linspace(-1, 1, N, dtype=dtype))
        self.rank = comm.rank
        self.optimizer = algorithm(torch.optim.SGD([self.p], lr=0.1), comm=comm, sync_every=1, **options)

    def step(self, step):
        noise = np.random.default_rng([self.rank, step]).normal(size=N) * np.linspace(0.01, 1, N)
        self.p.grad = self.p.detach() + torch.from_numpy(noise).to(self.p)
        self.optimizer.step()


@pytest.mark.slow
@pytest.mark.few(2)
@ways
@given(st.sampled_from([1, 2, 3, 5]), st.booleans())
def test_sent_and_left_are_what_was_given(way, m, weighted):
    """Σ w·(x − z) + Σ rests before = Σ w·(mean − z) + Σ rests after; all ranks the same bits."""

    def body(comm):
        task = Drifting(comm, LocalSGD, weighted=weighted, **way())
        z, kept = task.p.detach().clone(), torch.zeros(N, dtype=torch.float64)
        weight = comm.rank + 1.0 if weighted else 1.0
        history = []
        for step in range(STEPS):
            task.step(step)
            given = weight * (task.p.detach() - z) + kept
            task.optimizer.average(weight if weighted else None)
            before, z, kept = z, task.p.detach().clone(), rests(task.optimizer)
            history.append((given, z - before, kept, z, weight))
        return history

    for step in zip(*SimulatedWorld(m).run(body), strict=True):
        given, moved, kept, z, weights = zip(*step, strict=True)
        assert all(torch.equal(one, z[0]) for one in z)
        torch.testing.assert_close(
            moved[0] * sum(weights) + sum(kept), sum(given), rtol=0, atol=3e-6 if m > 1 else 1e-12
        )


def trained(algorithm, m=2, **options):
    def body(comm):
        ways = {key: value() if callable(value) else value for key, value in options.items()}
        task = Drifting(comm, algorithm, dtype=torch.float32, **ways.pop("way", {}), **ways)
        for step in range(60):
            task.step(step)
            task.optimizer.average()
        task.optimizer.finish()
        return task.p.detach().clone()

    models = SimulatedWorld(m).run(body)
    assert all(torch.equal(model, models[0]) for model in models)
    return models[0]


@pytest.mark.slow
@ways
def test_what_is_left_comes_later(way):
    plain, compressed = trained(LocalSGD), trained(LocalSGD, way=way)
    assert float((compressed - plain).norm() / plain.norm()) < 0.3


@pytest.mark.slow
@pytest.mark.few(2)
@ways
@pytest.mark.parametrize("m", [1, 2, 3])
def test_diloco_of_a_plain_outer_step_is_local_sgd_within_rounding(way, m):
    """Also compressed: an outer rate of 1 without momentum goes to the mean."""
    one = lambda: partial(torch.optim.SGD, lr=1.0)  # noqa: E731
    difference = trained(DiLoCo, m, way=way, outer=one) - trained(LocalSGD, m, way=way)
    assert float(difference.abs().max()) < (
        1e-5 if way is not sparse else 0.2
    )  # near its threshold it may choose apart


@pytest.mark.slow
@pytest.mark.few(8)
@ways
@classes
@pytest.mark.parametrize("at", [1, 4, 5])
def test_resumed_runs_have_the_same_bits(saved, way, algorithm, at):
    def body(comm, stop):
        task = Drifting(comm, algorithm, dtype=torch.float32, **way())
        task.optimizer.sync_every = 2
        for step in range(STEPS):
            if step == stop:
                state, x = saved(task.optimizer.state_dict()), task.p.detach().clone()
                task = Drifting(comm, algorithm, dtype=torch.float32, **way())
                task.optimizer.sync_every = 2
                task.p.data.copy_(x)
                task.optimizer.load_state_dict(state)
            task.step(step)
            task.optimizer.average()
        task.optimizer.finish()
        return torch.cat([task.p.detach(), rests(task.optimizer)])

    straight, resumed = (SimulatedWorld(2).run(lambda comm, s=stop: body(comm, s)) for stop in (None, at))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


class Two:
    """Parameters of a rank, by name, with gradients that differ from element to element."""

    def __init__(self, comm, shapes, **options):
        self.model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = LocalSGD(inner, comm=comm, model=self.model, sync_every=2, **options)

    def resume(self, state, model):
        for name, p in model.items():
            self.model[name].data.copy_(p.data)
        self.optimizer.load_state_dict(state)

    def train(self, steps):
        for step in steps:
            for p in self.model.values():
                p.grad = torch.linspace(0.1, 1 + step, p.numel()).view(p.shape)
            self.optimizer.step()
            self.optimizer.average()
        return torch.cat([p.detach().reshape(-1) for p in self.model.values()])


@pytest.mark.parametrize(("before", "after"), [(None, 40), (40, None)])
def test_residuals_of_another_cut_are_refused(saved, before, after):
    """They are by vector, so the first parameter's would go to all, or the others' be lost; nothing is changed."""

    def body(comm):
        task, other = (Two(comm, {"a": (1,), "b": (10,)}, bucket_bytes=cut, **sparse()) for cut in (before, after))
        task.train(range(3))
        other.train(range(2))
        state, kept, x = saved(task.optimizer.state_dict()), rests(other.optimizer), other.train([])
        block = copy.deepcopy(other.optimizer.state_dict()["distributed"]["block"])
        with pytest.raises(ValueError, match=r"the same bucket_bytes.*\['a', 'b'\].* of 11"):
            other.optimizer.load_state_dict(state)
        assert torch.equal(rests(other.optimizer), kept)
        assert torch.equal(other.train([]), x)
        assert other.optimizer.state_dict()["distributed"]["block"] == block

    SimulatedWorld(1).run(body)


@pytest.mark.parametrize("cut", [None, 40])
def test_rounded_residuals_outlive_another_cut(saved, cut):
    """They are by parameter."""

    def body(comm):
        task = Two(comm, {"a": (1,), "b": (10,)}, compress="int8")
        task.train(range(3))
        other = Two(comm, {"a": (1,), "b": (10,)}, compress="int8", bucket_bytes=cut)
        other.resume(saved(task.optimizer.state_dict()), task.model)
        assert torch.equal(rests(other.optimizer), rests(task.optimizer))
        return rests(task.optimizer).any()

    assert all(SimulatedWorld(2).run(body))


@ways
def test_parameters_may_have_any_name(saved, way):
    """Also those of the entries beside them."""
    shapes = {"kind": (3,), "parts": (4,), "sparsifier": (5,), "cut": (2,), "tensors": (1,)}

    def body(comm):
        task = Two(comm, shapes, **way())
        task.train(range(3))
        state = saved(task.optimizer.state_dict())
        other = Two(comm, shapes, **way())
        other.resume(state, task.model)
        assert torch.equal(rests(other.optimizer), rests(task.optimizer))
        assert torch.equal(other.train(range(3, 6)), task.train(range(3, 6)))

    SimulatedWorld(1).run(body)


@pytest.mark.parametrize(("way", "bits"), [("int8", 8), ("int4", 4), ("int2", 3)])
def test_bytes(way, bits):
    """2n(m − 1)/m elements a rank and boundary, of 2 bits half of them in 4, and less than 3 % on top."""
    n, m = 1 << 18, 4

    def body(comm):
        p = torch.nn.Parameter(torch.linspace(-1, 1, n))
        optimizer = LocalSGD(torch.optim.SGD([p], lr=0.1), comm=comm, sync_every=1, compress=way)
        before = comm.bytes_sent
        p.grad = torch.ones_like(p) * comm.rank
        optimizer.step()
        optimizer.average()
        return comm.bytes_sent - before

    for nbytes in SimulatedWorld(m).run(body):
        assert 1 <= nbytes / (2 * n * (m - 1) / m * bits / 8) < 1.03


@pytest.mark.slow
@ways
@classes
def test_uneven_ends_and_a_drained_state_for_any_number_of_ranks(saved, way, algorithm):
    def body(comm):
        task = Drifting(comm, algorithm, dtype=torch.float32, **way())
        task.optimizer.sync_every = comm.rank + 1
        for step in range(3 + 2 * comm.rank):
            task.step(step)
            task.optimizer.average()
        task.optimizer.finish()
        return saved(task.optimizer.state_dict()), task.p.detach().clone()

    (state, x), *others = SimulatedWorld(3).run(body)
    assert all(torch.equal(x, other) for _, other in others)

    def later(comm):
        task = Drifting(comm, algorithm, dtype=torch.float32, **way())
        task.p.data.copy_(x)
        task.optimizer.load_state_dict(state)
        if comm.rank:
            assert not rests(task.optimizer).any()
        for step in range(3):
            task.step(step)
            task.optimizer.average()
        return task.p.detach().clone()

    assert torch.equal(*SimulatedWorld(2).run(later))


@ways
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error_and_stays_in_no_rest(way, wrong):
    def body(comm):
        task = Drifting(comm, LocalSGD, dtype=torch.float32, **way())
        task.step(0)
        task.optimizer.average()
        before, z = rests(task.optimizer), task.p.detach().clone()
        if comm.rank == 1:
            task.p.data[7] = wrong
        with pytest.raises(CollectiveError, match=r"not finite in 'parameter 0'; NaN or inf in the .* ranks \[1\]"):
            task.optimizer.average()
        assert torch.isfinite(rests(task.optimizer)).all()
        if comm.rank == 0:
            assert torch.equal(task.p, z)
        return before, rests(task.optimizer)

    for before, after in SimulatedWorld(2).run(body):
        if way is not sparse:
            assert torch.equal(before, after)


@ways
def test_the_averaged_model_is_exact_and_changes_nothing(way):
    def body(comm):
        task = Drifting(comm, LocalSGD, **way())
        task.optimizer.sync_every = 3
        for step in range(4):
            task.step(step)
            task.optimizer.average()
        x, kept = task.p.detach().clone(), rests(task.optimizer)
        with task.optimizer.averaged_model():
            shown = task.p.detach().clone()
        assert torch.equal(task.p, x)
        assert torch.equal(rests(task.optimizer), kept)
        task.optimizer.finish()
        return x, shown

    xs, shown = zip(*SimulatedWorld(3).run(body), strict=True)
    torch.testing.assert_close(shown[0], sum(xs) / 3)


def test_bad_input():
    def make(algorithm=LocalSGD, **options):
        p = torch.nn.Parameter(torch.zeros(3))
        return algorithm(torch.optim.SGD([p], lr=0.1), **options)

    def body(comm):
        with pytest.raises(ValueError, match=r"compress is 'int3', expected None, one of \('int8', 'int4', 'int2'\)"):
            make(comm=comm, compress="int3")
        with pytest.raises(TypeError, match="or a compressor with error feedback: compress"):
            make(comm=comm, compress=lambda x: x, allreduce=dropping)
        with pytest.raises(TypeError, match=r"compress is <class .*ErrorFeedback'>, expected None, one of"):
            make(comm=comm, compress=ErrorFeedback, allreduce=dropping)
        whole = make(comm=comm, compress=Halves(), allreduce=lambda sent, comm: sent, sync_every=1)
        whole.step()
        with pytest.raises(
            TypeError, match=r"allreduce returned a Tensor, expected something with \.total and \.dropped"
        ):
            whole.average()
        with pytest.raises(TypeError, match="allreduce is None, but compress is a compressor"):
            make(comm=comm, compress=Halves())
        with pytest.raises(ValueError, match="allreduce sums what a compressor sends, but compress is 'int8'"):
            make(DiLoCo, comm=comm, compress="int8", allreduce=dropping)
        unsettled = Halves()
        unsettled.tentative = True
        with pytest.raises(ValueError, match="has tentative=True"):
            make(comm=comm, compress=unsettled, allreduce=dropping)
        with pytest.raises(ValueError, match=r"has momentum=0\.9, so that it sends each change several times over"):
            make(comm=comm, compress=ErrorFeedback(TopK(0.5), momentum=0.9), allreduce=dropping)
        with pytest.raises(ValueError, match="native=True is the transport's sum"):
            make(comm=comm, compress="int8", native=True)
        with pytest.raises(TypeError, match="compress"):
            make(BMUF, comm=comm, compress="int8")
        plain, rounded = make(DiLoCo, comm=comm), make(DiLoCo, comm=comm, compress="int8")
        scarce = make(DiLoCo, comm=comm, **sparse())
        for one, other in [(plain, rounded), (rounded, plain), (rounded, scarce)]:
            with pytest.raises(ValueError, match="the state is of compression"):
                one.load_state_dict(other.state_dict())

    SimulatedWorld(1).run(body)


def test_ranks_that_compress_otherwise():
    def body(comm):
        Drifting(comm, LocalSGD, compress=["int8", "int4"][comm.rank])

    with pytest.raises(CollectiveError, match="compress=int8"):
        SimulatedWorld(2).run(body)
