"""Momentum inside and outside: what the defaults multiply, and which settings are warned about."""

import warnings
from functools import partial

import pytest
import torch
from communicators import SimulatedWorld
from local_sgd import ALGORITHMS, BMUF, DiLoCo, LocalSGD, SlowMo, StreamingDiLoCo
from local_sgd.two_momenta import carried

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def said_by(make, *, inner=MOMENTUM, steps=5, size=2):
    """The warnings of all ranks."""

    def body(comm):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = make(inner([p]), comm=comm)
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.average()
        optimizer.finish()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SimulatedWorld(size).run(body)
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def test_what_a_gradient_does_after_its_block_is_counted():
    momentum, steps = 0.9, 4
    moves = [momentum**age for age in range(1000)]
    assert carried(momentum, steps) == pytest.approx(sum(moves[steps:]))


@pytest.mark.parametrize(
    "make",
    [
        partial(SlowMo, alpha=1.0, beta=0.7),
        partial(SlowMo, alpha=1.0, beta=0.5),
        partial(BMUF, block_rate=1.0, momentum=0.875),
        partial(DiLoCo, sync_every=4),
        partial(StreamingDiLoCo, sync_every=4, fragments=1),
    ],
)
def test_two_momenta_that_multiply_are_said_once_with_what_to_do(make):
    said, on_the_other_rank = said_by(make, steps=12)
    assert said == on_the_other_rank
    assert "two momenta multiply each other" in said
    assert "that of the SGD inside, 0.9, goes on from block to block of 4 steps" in said
    assert "inner_state='reset'" in said


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "inner", [MOMENTUM, partial(MOMENTUM, nesterov=True), partial(torch.optim.AdamW, weight_decay=0.0)]
)
@pytest.mark.parametrize("size", [2, 8])
def test_no_default_is_warned_about(inner, size):
    for make in ALGORITHMS.values():
        assert said_by(make, inner=inner, size=size) == []


@pytest.mark.parametrize(
    ("make", "inner"),
    [
        (partial(DiLoCo, sync_every=4), torch.optim.AdamW),  # the paper's, but for its 500 steps
        (partial(DiLoCo, sync_every=20), MOMENTUM),  # the apps' default
        (partial(SlowMo, alpha=1.0, beta=0.7, sync_every=48), MOMENTUM),  # as in the authors' code
        (partial(SlowMo, alpha=1.0, beta=0.7, inner_state="reset"), MOMENTUM),
        (partial(BMUF, block_rate=1.0, momentum=0.875, inner_state="reset"), MOMENTUM),  # CNTK's
        (partial(SlowMo, alpha=1.0, beta=0.7), partial(torch.optim.SGD, lr=0.05)),
        (partial(DiLoCo, outer=partial(torch.optim.SGD, lr=0.7), sync_every=4), MOMENTUM),
        (partial(DiLoCo, outer=partial(torch.optim.Adam, lr=0.7), sync_every=4), MOMENTUM),
        (partial(LocalSGD, sync_every=1), partial(MOMENTUM, momentum=0.99)),
    ],
)
def test_published_recipes_are_not_warned_about(make, inner):
    assert said_by(make, inner=inner) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("algorithm", [SlowMo, BMUF])
def test_defaults_move_as_far_as_local_sgd(algorithm, size):
    """A constant gradient: what blocks change is not multiplied, whatever the number of ranks."""

    def body(comm):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = algorithm(torch.optim.SGD([p], lr=0.1), comm=comm, sync_every=2)
        places = []
        for _ in range(300):
            p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.average()
            places.append(p.item())
        return (places[-21] - places[-1]) / 20 / 0.1

    assert SimulatedWorld(size).run(body) == pytest.approx([1.0] * size, rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [SlowMo, BMUF])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("curvature", [0.1, 1.0, 10.0])
def test_defaults_are_stable_where_sgd_with_momentum_is(algorithm, size, curvature):
    """A quadratic at a rate of 0.05: curvature times rate is far below 2(1 + 0.9), where SGD itself diverges."""

    def body(comm):
        p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = algorithm(MOMENTUM([p]), comm=comm)
        for _ in range(600):
            p.grad = curvature * p.detach()
            optimizer.step()
            optimizer.average()
        optimizer.finish()
        return abs(p.item())

    assert max(SimulatedWorld(size).run(body)) < 0.01


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_an_end_without_a_step_says_nothing(algorithm):
    assert said_by(algorithm, steps=0) == []


def test_a_rate_that_is_left_out_follows_the_momentum():
    optimizer = SlowMo(MOMENTUM([torch.nn.Parameter(torch.ones(1))]), beta=0.8)
    assert optimizer.rule.alpha == pytest.approx(0.2)
    optimizer = BMUF(MOMENTUM([torch.nn.Parameter(torch.ones(1))]), momentum=0.75)
    assert optimizer.rule.block_rate == 0.25
