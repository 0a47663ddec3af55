"""Adam's steps by ranks' own gradients: their mean is nearly as long as the step by the mean gradient."""

import copy
import warnings

import pytest
import torch
from communicators import SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import DistributedOptimizer
from torch import nn

ADAMS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
}
NUMEL = 4000


def path(size, optimizer, signal, steps=60, *, dtype=torch.float32, seed=0, **options):
    """Parameters of `size` ranks after the last steps, and of dense training; gradients are signal + noise of 1."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(NUMEL, generator=generator).sign()
    gradients = [signal * direction + torch.randn(size, NUMEL, generator=generator) for _ in range(steps)]

    def body(comm):
        p = nn.Parameter(torch.ones(NUMEL, dtype=dtype))
        wrapper = DistributedOptimizer(ADAMS[optimizer]([p]), [("p", p)], comm=comm, sends="updates", **options)
        for gradient in gradients:
            p.grad = gradient[comm.rank].to(dtype)
            wrapper.step()
        return p.detach(), wrapper.state_dict()["distributed"]["residuals"]["p"]

    dense = nn.Parameter(torch.ones(NUMEL, dtype=dtype))
    alone = ADAMS[optimizer]([dense])
    for gradient in gradients:
        dense.grad = gradient.mean(0).to(dtype)
        alone.step()
    return SimulatedWorld(size).run(body), dense.detach()


@pytest.mark.parametrize("optimizer", ADAMS)
@pytest.mark.parametrize("signal", [0.0, 0.1, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("size", [2, 8])
def test_all_sent_it_moves_half_as_much_too_little(optimizer, size, signal):
    """On a scale of ratios: by c¹ᐟ⁴ in place of c¹ᐟ², c = f + (1 − f)/P. Within 6 percent; in the same direction."""
    results, dense = path(size, optimizer, signal, density=1.0)
    moved, meant = results[0][0] - 1, dense - 1
    share = signal**2 / (signal**2 + 1)
    expected = (share + (1 - share) / size) ** 0.25
    assert float(moved.norm() / meant.norm()) == pytest.approx(expected, rel=0.06)
    assert float(moved @ meant / moved.norm() / meant.norm()) > 0.95


@pytest.mark.parametrize("optimizer", ADAMS)
def test_one_rank_is_left_as_it_is(optimizer):
    results, dense = path(1, optimizer, 0.1, steps=5, density=1.0, dtype=torch.float64)
    torch.testing.assert_close(results[0][0], dense, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("optimizer", ADAMS)
def test_without_any_noise_nothing_is_changed(optimizer):
    """Gradients that are the same in all steps: f is 1, whatever the number of ranks."""

    def body(comm):
        p = nn.Parameter(torch.ones(9, dtype=torch.float64))
        plain = copy.deepcopy(p)
        alone = ADAMS[optimizer]([plain])
        options = {"comm": comm, "sends": "updates", "density": 1.0}
        wrapper = DistributedOptimizer(ADAMS[optimizer]([p]), [("p", p)], **options)
        for _ in range(8):
            p.grad = plain.grad = torch.arange(-4.0, 5.0, dtype=torch.float64)
            wrapper.step()
            alone.step()
        return p.detach(), plain.detach()

    torch.testing.assert_close(*SimulatedWorld(4).run(body)[0], rtol=1e-6, atol=1e-6)


@given(size=st.sampled_from([2, 3]), density=st.sampled_from([0.01, 0.3]), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:the gradients of this step were made")
def test_what_is_applied_and_what_waits_are_the_lengthened_updates(size, density, seed):
    """P · applied + Σ residuals is the same at any density, where gradients are."""
    sparse, _ = path(size, "adam", 0.1, steps=6, density=density, dtype=torch.float64, seed=seed)
    whole, _ = path(size, "adam", 0.1, steps=6, density=1.0, dtype=torch.float64, seed=seed)
    assert all(torch.equal(p, sparse[0][0]) for p, _ in sparse)
    total = size * (sparse[0][0] - 1) + sum(residual for _, residual in sparse)
    torch.testing.assert_close(total, size * (whole[0][0] - 1), rtol=1e-9, atol=1e-12)


def test_decoupled_weight_decay_is_as_long_as_ever():
    """Of noise alone, by which elements go up as often as down, the mean over elements is what the decay makes."""

    def body(comm):
        p = nn.Parameter(torch.ones(NUMEL, dtype=torch.float64))
        inner = torch.optim.AdamW([p], lr=0.01, weight_decay=1.0)
        wrapper = DistributedOptimizer(inner, [("p", p)], comm=comm, sends="updates", density=1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(20):
            p.grad = torch.randn(NUMEL, dtype=torch.float64, generator=generator)
            wrapper.step()
        return p.detach()

    results = SimulatedWorld(4).run(body)
    assert float(results[0].mean()) == pytest.approx(0.99**20, rel=0.005)


@pytest.mark.parametrize("size", [1, 4])
def test_decay_that_16_bits_round_off_does_not_come_back_as_growth(size):
    """AdamW's decay is less than half a step of bfloat16 here, so that on one rank nothing happens."""

    def body(comm):
        p = nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16))
        inner = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1)
        wrapper = DistributedOptimizer(inner, [("p", p)], comm=comm, sends="updates", density=1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(30):
            p.grad = torch.randn(NUMEL, generator=generator).to(torch.bfloat16)
            wrapper.step()
        return float(p.detach().double().mean()) + float(
            wrapper.state_dict()["distributed"]["residuals"]["p"].double().mean()
        )

    assert max(SimulatedWorld(size).run(body)) <= 1


def test_without_a_mean_over_steps_steps_are_left_as_they_are():
    """β₁ = 0: the moments tell nothing of f."""

    def body(comm):
        p = nn.Parameter(torch.zeros(NUMEL))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            inner = torch.optim.Adam([p], lr=0.01, betas=(0.0, 0.99))
            wrapper = DistributedOptimizer(inner, [("p", p)], comm=comm, sends="updates", density=1.0)
        alone = nn.Parameter(torch.zeros(NUMEL))
        plain = torch.optim.Adam([alone], lr=0.01, betas=(0.0, 0.99))
        generator = torch.Generator().manual_seed(0)
        for _ in range(12):
            p.grad = torch.randn(NUMEL, generator=generator) + 1
            alone.grad = p.grad.clone()
            wrapper.step()
            plain.step()
        torch.testing.assert_close(p.detach(), alone.detach(), rtol=1e-4, atol=1e-5)
        return [str(each.message) for each in said]

    assert all(any("betas[0] > 0" in each for each in said) for said in SimulatedWorld(4).run(body))


def test_lbfgs_is_refused():
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match="LBFGS"):
        DistributedOptimizer(
            torch.optim.LBFGS([p]), [("p", p)], comm=SimulatedWorld(1).run(lambda c: c)[0], sends="updates"
        )


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.RAdam])
def test_others_that_divide_by_the_size_of_gradients_are_warned_about(kind):
    def body(comm):
        model = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match=rf"{kind.__name__}.*up to 1\.4 times too short"):
            DistributedOptimizer(kind(model.parameters()), model.named_parameters(), comm=comm, sends="updates")

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize(("kind", "size"), [(torch.optim.SGD, 2), (torch.optim.AdamW, 2), (torch.optim.RMSprop, 1)])
def test_where_nothing_is_too_short_nobody_is_warned(kind, size):
    def body(comm):
        model = nn.Linear(2, 2)
        DistributedOptimizer(kind(model.parameters()), model.named_parameters(), comm=comm, sends="updates")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SimulatedWorld(size).run(body)
