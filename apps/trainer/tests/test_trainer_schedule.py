"""The learning rate."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.training.learning_rate import SHAPES, factor, milestones, rate_schedule

pytestmark = pytest.mark.quick


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    total_steps=st.integers(1, 200),
    warmup_steps=st.integers(0, 50),
    step=st.integers(0, 250),
)
def test_the_rate_never_exceeds_its_peak_and_is_zero_only_after_the_end(
    shape: object, total_steps: int, warmup_steps: int, step: int
) -> None:
    value = factor(step, total_steps=total_steps, warmup_steps=warmup_steps, shape=shape)  # type: ignore[arg-type]
    assert 0 <= value <= 1
    assert value > 0 or step >= total_steps


def test_shapes_at_known_points() -> None:
    def rate(name: str, step: int, warmup_steps: int = 0) -> float:
        return factor(step, total_steps=100, warmup_steps=warmup_steps, shape=SHAPES[name])

    assert [rate("step", step) for step in (0, 49, 50, 74, 75, 99)] == [1, 1, 0.1, 0.1, 0.01, 0.01]
    assert [rate("constant", step, warmup_steps=4) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    assert rate("cosine", 50) == pytest.approx(0.5)
    assert rate("cosine", 25) == pytest.approx(0.5 + math.sqrt(2) / 4)


@given(epochs=st.integers(1, 400), steps=st.integers(1, 1000), drops=st.sets(st.integers(1, 450), max_size=4))
def test_the_rate_drops_to_a_tenth_with_the_first_step_after_each_milestone(
    epochs: int, steps: int, drops: set[int]
) -> None:
    curve = milestones(sorted(drops), of=epochs)

    def rate(step: int) -> float:
        return factor(step, total_steps=epochs * steps, warmup_steps=0, shape=curve)

    for done, drop in enumerate(sorted(drops & set(range(epochs)))):
        assert rate(drop * steps - 1) == pytest.approx(0.1**done)
        assert rate(drop * steps) == pytest.approx(0.1 ** (done + 1))
    assert rate(epochs * steps - 1) == pytest.approx(0.1 ** sum(drop < epochs for drop in drops))


def test_the_scheduler_sets_the_rate_of_every_step(options: Callable[..., Options]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    schedule = rate_schedule(optimizer, options(max_epochs=2, warmup_epochs=0.5, lr_schedule="step"), steps_per_epoch=4)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    dropping = rate_schedule(optimizer, replace(options(max_epochs=9), milestones=[1, 3]), steps_per_epoch=4)
    assert [dropping.lr_lambdas[0](step) for step in (3, 4, 11, 12)] == pytest.approx([1, 0.1, 0.1, 0.01])
