"""In a simulated world each rank may have torch's global generator to itself, as processes have."""

from __future__ import annotations

import pytest
import torch
from communicators import Link, SimulatedWorld, barrier
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick


def masks(comm):
    """Of a dropout before each of three meetings; ranks compute unlike long."""
    drawn = []
    for step in range(3):
        drawn.append(torch.nn.functional.dropout(torch.ones(16)))
        comm.elapse((comm.rank * 7 + step) % 3)
        barrier(comm)
    return torch.stack(drawn)


def ranks_alike(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(
    slowdown=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    alpha=st.sampled_from([1e-6, 1.0]),
    order=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=9),
)
def test_what_a_rank_draws_does_not_depend_on_who_ran_before(slowdown, alpha, order):
    turn = iter(range(1 << 30))
    world = SimulatedWorld(
        3, Link(alpha, 0.0), slowdown=slowdown, draw=lambda: order[next(turn) % len(order)], own_generators=True
    )
    assert ranks_alike(world.run(masks), SimulatedWorld(3, own_generators=True).run(masks))


def test_ranks_and_seeds_draw_unlike():
    found = [mask for seed in (0, 1) for mask in SimulatedWorld(3, seed=seed, own_generators=True).run(masks)]
    assert len({tuple(mask.flatten().tolist()) for mask in found}) == 6


def test_a_rank_that_seeds_draws_what_a_process_of_its_own_would():
    def seeded(comm):
        torch.manual_seed(comm.rank)
        return masks(comm)

    def alone(rank):
        torch.manual_seed(rank)
        return SimulatedWorld(1).run(masks)[0]

    expected = [alone(rank) for rank in range(3)]
    assert ranks_alike(SimulatedWorld(3, own_generators=True).run(seeded), expected)


def test_the_callers_generator_stays_as_it_was():
    def fails(comm):
        torch.manual_seed(5)
        barrier(comm)
        torch.rand(3)
        raise ValueError("on purpose")

    before = torch.get_rng_state()
    SimulatedWorld(3, own_generators=True).run(masks)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="on purpose"):
        SimulatedWorld(3, own_generators=True).run(fails)
    assert torch.equal(torch.get_rng_state(), before)
