"""Each algorithm against its recurrence in a few lines of NumPy, all ranks at once, on a noisy quadratic."""

from functools import partial

import numpy as np
import pytest
import torch
from communicators import SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from local_sgd import BMUF, EASGD, CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, SlowMo
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:two momenta multiply")  # a recurrence holds there too

N, STEPS = 5, 50
SIZES = st.sampled_from([1, 2, 3, 5])
TAUS = st.integers(1, 8)
FRACTIONS = st.floats(0.0, 0.95)
RATES = st.floats(0.01, 0.9)


def noise(seed, rank):
    return np.random.default_rng([seed, rank]).normal(size=(STEPS, N)) + rank


def inner_settings(seed):
    """The learning rate as a function of the step, and the inner SGD's momentum."""
    drawn = np.random.default_rng([seed, 99])
    rate, decay = drawn.uniform(0.02, 0.4), drawn.uniform(0.9, 1.0)
    return lambda step: rate * decay**step, drawn.choice([0.0, drawn.uniform(0.1, 0.9)])


def trained(make, m, seed):
    """Every rank's x after every step, and the model at the end: (m, STEPS, N), (N,)."""

    def body(comm):
        p = nn.Parameter(torch.linspace(-1, 1, N, dtype=torch.float64))
        schedule, momentum = inner_settings(seed)
        inner = torch.optim.SGD([p], lr=schedule(0), momentum=momentum)
        optimizer = make(inner, comm)
        history = []
        for step, shift in enumerate(noise(seed, comm.rank)):
            inner.param_groups[0]["lr"] = schedule(step)
            p.grad = p.detach() - torch.from_numpy(shift)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.average()
            history.append(p.detach().numpy().copy())
        with optimizer.averaged_model():
            model = p.detach().numpy().copy()
        optimizer.finish()
        return np.array(history), model, p.detach().numpy().copy()

    histories, models, ends = zip(*SimulatedWorld(m).run(body), strict=True)
    assert all(np.array_equal(model, models[0]) for model in models)
    assert all(np.array_equal(end, ends[0]) for end in ends)
    return np.array(histories), models[0]


def reference(rule, m, tau, seed, **kept):
    """rule(x, kept, γ) gives x of all ranks after a boundary; kept begins with z = x, v = 0."""
    x = np.tile(np.linspace(-1, 1, N), (m, 1))
    (schedule, momentum), buffer = inner_settings(seed), np.zeros_like(x)
    kept = {"z": x[0].copy(), "v": np.zeros(N), "γ": schedule(tau - 1), "y": x.copy(), **kept}
    shifts, history = np.array([noise(seed, rank) for rank in range(m)]), []
    for step in range(STEPS):
        buffer = momentum * buffer + (x - shifts[:, step])
        x = x - schedule(step) * buffer
        if (step + 1) % tau == 0:
            x = rule(x, kept, schedule(step))
        history.append(x.copy())
    return np.array(history).transpose(1, 0, 2), x, kept


def assert_close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * scale)


@given(SIZES, TAUS, st.integers(0, 99))
def test_local_sgd(m, tau, seed):
    expected, x, _ = reference(lambda x, kept, γ: np.tile(x.mean(0), (m, 1)), m, tau, seed)
    found, model = trained(lambda inner, comm: LocalSGD(inner, comm=comm, sync_every=tau), m, seed)
    assert_close(found, expected)
    assert_close(model, x.mean(0))


@given(SIZES, TAUS, RATES, FRACTIONS, st.booleans(), st.integers(0, 99))
def test_bmuf(m, tau, ζ, η, nesterov, seed):
    def rule(x, kept, γ):
        g = kept["z"] - x.mean(0)
        kept["v"] = η * kept["v"] + ζ * g
        kept["z"] = kept["z"] - (ζ * g + η * kept["v"] if nesterov else kept["v"])
        return np.tile(kept["z"], (m, 1))

    def make(inner, comm):
        return BMUF(inner, comm=comm, sync_every=tau, block_rate=ζ, momentum=η, nesterov=nesterov)

    expected, _, kept = reference(rule, m, tau, seed)
    found, model = trained(make, m, seed)
    assert_close(found, expected)
    assert_close(model, kept["z"])


@given(SIZES, TAUS, RATES, FRACTIONS, st.integers(0, 99))
def test_slowmo(m, tau, α, β, seed):
    def rule(x, kept, γ):  # as the paper has it, u in units of 1/γ
        kept["v"] = β * kept["v"] + (kept["z"] - x.mean(0)) / γ
        kept["z"] = kept["z"] - α * γ * kept["v"]
        return np.tile(kept["z"], (m, 1))

    expected, _, kept = reference(rule, m, tau, seed)
    found, model = trained(lambda inner, comm: SlowMo(inner, comm=comm, sync_every=tau, alpha=α, beta=β), m, seed)
    assert_close(found, expected)
    assert_close(model, kept["z"])


@given(SIZES, TAUS, st.floats(0.05, 0.95), st.integers(0, 99))
def test_easgd(m, tau, fraction, seed):
    α = fraction * 2 / (m + 1)

    def rule(x, kept, γ):
        z = kept["z"]
        kept["z"] = z + α * (x - z).sum(0)
        return (1 - α) * x + α * z

    expected, _, kept = reference(rule, m, tau, seed)
    found, model = trained(lambda inner, comm: EASGD(inner, comm=comm, sync_every=tau, alpha=α), m, seed)
    assert_close(found, expected)
    assert_close(model, kept["z"])


@given(SIZES, TAUS, st.integers(0, 99))
def test_cocod(m, tau, seed):
    def rule(x, kept, γ):
        kept["y"] = x + (kept["y"].mean(0) - kept["y"])
        return kept["y"]

    expected, x, _ = reference(rule, m, tau, seed)
    found, model = trained(lambda inner, comm: CoCoDSGD(inner, comm=comm, sync_every=tau), m, seed)
    assert_close(found, expected)
    assert_close(model, x.mean(0))


@given(SIZES, TAUS, FRACTIONS, FRACTIONS, st.integers(0, 99))
def test_overlap_local_sgd(m, tau, α, β, seed):
    """As the authors' code has it: a momentum on every rank, and z − b is what travels."""

    def rule(x, kept, γ):
        kept["z"] = kept["w"].mean(0)
        x = (1 - α) * x + α * kept["z"]
        kept["b"] = β * kept["b"] + (kept["z"] - x)
        kept["w"] = kept["z"] - kept["b"]
        return x

    start = np.tile(np.linspace(-1, 1, N), (m, 1))
    expected, _, kept = reference(rule, m, tau, seed, w=start, b=np.zeros((m, N)))
    make = lambda inner, comm: OverlapLocalSGD(inner, comm=comm, sync_every=tau, alpha=α, beta=β)  # noqa: E731
    found, model = trained(make, m, seed)
    assert_close(found, expected)
    assert_close(model, kept["w"].mean(0))


@given(SIZES, TAUS, RATES, FRACTIONS, st.integers(0, 99))
def test_diloco(m, tau, η, β, seed):
    def rule(x, kept, γ):
        delta = kept["z"] - x.mean(0)
        kept["v"] = β * kept["v"] + delta
        kept["z"] = kept["z"] - η * (delta + β * kept["v"])
        return np.tile(kept["z"], (m, 1))

    def make(inner, comm):
        outer = partial(torch.optim.SGD, lr=η, momentum=β, nesterov=β > 0)
        return DiLoCo(inner, comm=comm, sync_every=tau, outer=outer)

    expected, _, kept = reference(rule, m, tau, seed)
    found, model = trained(make, m, seed)
    assert_close(found, expected)
    assert_close(model, kept["z"])
