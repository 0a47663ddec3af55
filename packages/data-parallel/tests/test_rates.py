"""Parameter groups of unlike learning rates, with updates sent: none waits for another's to be small."""

import copy

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import UpdateOptimizer
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

SHAPES = [(20, 30), (7,), (12, 20), (5, 5)]


def trained(comm, rates, *, steps, inner=torch.optim.SGD, seed=0, **options):
    """Parameters, one a group, after steps with the same gradients whatever the rates."""
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(SHAPES[: len(rates)])]
    groups = [{"params": [p], "lr": rate} for (_, p), rate in zip(named, rates, strict=True)]
    optimizer = UpdateOptimizer(inner(groups), named, comm=comm, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + comm.rank)
        with optimizer.ahead():
            for _, p in named:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for _, p in named]


@given(size=st.sampled_from([1, 2, 3]), ratio=st.sampled_from([4.0, 64.0, 1024.0]), seed=st.integers(0, 99))
def test_what_moves_of_a_group_does_not_depend_on_how_much_lower_its_rate_is(size, ratio, seed):
    """By SGD, to the bit: a power of two as ratio, so that all of it is scaled exactly."""
    ran = [
        SimulatedWorld(size).run(
            lambda comm, low=low: trained(comm, [1.0, 1.0, low], steps=12, seed=seed, density=0.05)
        )
        for low in (0.25, 1 / ratio)
    ]
    for (*high, low), (*others, lower) in zip(*ran, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(high, others, strict=True))
        assert torch.equal(low / 0.25, lower * ratio)
        assert low.any()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("ratio", [10, 100])
def test_a_group_of_a_low_rate_moves_from_the_first_steps_on(inner, ratio):
    rates = [0.1, 0.1, 0.1 / ratio]
    found = SimulatedWorld(2).run(lambda comm: trained(comm, rates, steps=20, inner=inner, density=0.05))[0]
    high, _, low = (float((p != 0).float().mean()) for p in found)
    assert low > 0.5 * high > 0.1


@given(rates=st.lists(st.sampled_from([0.0, 1e-4, 1.5e-4, 1e-3, 0.1, 0.2]), min_size=4, max_size=4))
def test_rates_within_a_factor_of_two_are_selected_from_together(rates):
    """So that a decay over layers makes few exchanges of many."""
    before, after = SimulatedWorld(2), SimulatedWorld(2)
    before.run(lambda comm: trained(comm, rates, steps=0, density=0.05))
    after.run(lambda comm: trained(comm, rates, steps=1, density=0.05))
    classes, top = 0, None
    for rate in sorted(set(rates), reverse=True):
        if top is None or 2 * rate < top:
            classes, top = classes + 1, rate
    assert after.messages_sent[0] - before.messages_sent[0] == classes  # gtopk on two ranks: one message an exchange


def test_a_scheduler_that_begins_at_zero_does_not_make_all_groups_alike():
    named = [("high", nn.Parameter(torch.zeros(100))), ("low", nn.Parameter(torch.zeros(100)))]
    inner = torch.optim.SGD([{"params": [named[0][1]], "lr": 1.0}, {"params": [named[1][1]], "lr": 0.01}])
    torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.0)
    optimizer = UpdateOptimizer(inner, named, density=0.1)
    inner.param_groups[0]["lr"], inner.param_groups[1]["lr"] = 1.0, 0.01
    for _, p in named:
        p.grad = torch.linspace(1, 2, 100)
    with optimizer.ahead():
        pass
    optimizer.step()
    assert [int((p != 0).sum()) for _, p in named] == [10, 10]


def made(comm, rates, *, inner=torch.optim.SGD, scheduled=None, **options):
    """Parameters of 100 elements, one a group; `scheduled` makes a scheduler before the wrapper."""
    named = [(f"p{i}", nn.Parameter(torch.zeros(100))) for i in range(len(rates))]
    wrapped = inner([{"params": [p], "lr": rate} for (_, p), rate in zip(named, rates, strict=True)])
    scheduler = scheduled(wrapped) if scheduled else None
    return named, UpdateOptimizer(wrapped, named, comm=comm, **options), scheduler


def stepped(named, optimizer, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    with optimizer.ahead():
        for _, p in named:
            p.grad = torch.randn(100, generator=generator) + 0.3
    optimizer.step()


def test_ranks_that_cut_by_other_rates_are_told_so_at_construction():
    def body(comm):
        with pytest.raises(CollectiveError, match="learning rates"):
            made(comm, [0.1, 0.001] if comm.rank == 0 else [0.001, 0.1])

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize("later", [[0.001, 0.1], [0.1, 0.1]])
def test_ranks_whose_rates_part_later_are_told_so_in_that_step(later):
    def body(comm):
        named, optimizer, _ = made(comm, [0.1, 0.001], density=0.1)
        stepped(named, optimizer, 0, comm.rank)
        if comm.rank == 1:
            for group, rate in zip(optimizer.param_groups, later, strict=True):
                group["lr"] = rate
        before = [p.detach().clone() for _, p in named]
        with pytest.raises(CollectiveError, match="learning rates"):
            stepped(named, optimizer, 1, comm.rank)
        assert all(torch.equal(old, p) for old, (_, p) in zip(before, named, strict=True))

    SimulatedWorld(2).run(body)


def by_lambda(wrapped):
    return torch.optim.lr_scheduler.LambdaLR(wrapped, [lambda step: 1.0, lambda step: 0.01])


def by_hand(optimizer):
    optimizer.param_groups[1]["lr"] = 0.001


@pytest.mark.parametrize(("scheduled", "later"), [(by_lambda, lambda optimizer: None), (None, by_hand)])
def test_what_counts_are_the_rates_of_the_step(scheduled, later):
    """Not the base rates of a scheduler, nor those at construction."""

    def body(comm):
        named, optimizer, _ = made(comm, [0.1, 0.1], scheduled=scheduled, density=0.05)
        later(optimizer)
        for step in range(5):
            stepped(named, optimizer, step, comm.rank)
        return [int((p != 0).sum()) for _, p in named]

    high, low = SimulatedWorld(2).run(body)[0]
    assert low > 0.5 * high > 0


@given(
    size=st.sampled_from([1, 2, 3]),
    algorithm=st.sampled_from(["gtopk", "oktopk", "spardl"]),
    factors=st.lists(st.sampled_from([0.01, 0.3, 1.0]), min_size=6, max_size=6),
    nonfinite=st.sampled_from(["raise", "skip"]),
    resumed=st.integers(0, 6),
    built=st.sampled_from([[0.1, 0.1], [0.1, 0.001]]),
    scheduled_before=st.booleans(),
)
@example(2, "oktopk", [0.01] * 6, "raise", 4, [0.1, 0.1], False)  # what it knows of ranks is by bucket
@example(2, "oktopk", [1.0, 1.0, 1.0, 0.01, 0.01, 0.01], "raise", 3, [0.1, 0.001], True)
@example(2, "spardl", [0.01] * 6, "raise", 3, [0.1, 0.1], False)
@example(2, "spardl", [1.0, 1.0, 1.0, 0.01, 0.01, 0.01], "raise", 3, [0.1, 0.001], True)
def test_nothing_is_lost_where_rates_change_classes_and_a_resumed_run_has_the_same_bits(
    size, algorithm, factors, nonfinite, resumed, built, scheduled_before
):
    """By SGD: parameters + the mean of what waits are those of dense training."""

    def body(comm, resumes):
        made_as = {"algorithm": algorithm, "density": 0.1, "nonfinite": nonfinite, "comm": comm}
        named, optimizer, _ = made(rates=[0.1, 0.1], **made_as)
        for step, factor in enumerate(factors):
            if scheduled_before:  # and not after the state was taken
                optimizer.param_groups[1]["lr"] = 0.1 * factor
            if resumes and step == resumed:
                state, old = copy.deepcopy(optimizer.state_dict()), named
                named, optimizer, _ = made(rates=built, **made_as)
                optimizer.load_state_dict(state)
                for (_, p), (_, before) in zip(named, old, strict=True):
                    p.data.copy_(before)
            optimizer.param_groups[1]["lr"] = 0.1 * factor
            stepped(named, optimizer, step, comm.rank)
        own = optimizer.state_dict()["distributed"]
        learnt = str(sorted(own["algorithm_state"]))
        return [p.detach().clone() for _, p in named], [own["residuals"][name] for name, _ in named], learnt

    whole, again = (SimulatedWorld(size).run(lambda comm, how=how: body(comm, how)) for how in (False, True))
    for (parameters, residuals, learnt), (others, other_residuals, others_learnt) in zip(whole, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(residuals, other_residuals, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(parameters, whole[0][0], strict=True))
        assert learnt == others_learnt
    for i, rates in enumerate([[0.1] * 6, [0.1 * factor for factor in factors]]):
        dense = torch.zeros(100)
        for rank in range(size):
            draws = [torch.Generator().manual_seed(10 * step + rank) for step in range(6)]
            for rate, draw in zip(rates, draws, strict=True):
                dense -= rate * torch.stack([torch.randn(100, generator=draw) + 0.3 for _ in range(2)])[i] / size
        waits = torch.stack([residuals[i] for _, residuals, _ in whole]).mean(0)
        torch.testing.assert_close(whole[0][0][i] + waits, dense, rtol=1e-4, atol=1e-5)


def test_a_skipped_step_undoes_nothing_of_a_cut_that_came_before_it():
    def body(comm, poisoned):
        named, optimizer, _ = made(comm, [0.1, 0.1], density=0.1, nonfinite="skip")
        for step in range(4):
            optimizer.param_groups[1]["lr"] = [0.1, 0.001, 0.001, 0.1][step]
            if step == 1 and poisoned:
                with optimizer.ahead():
                    for _, p in named:
                        p.grad = torch.full((100,), torch.nan if comm.rank == 0 else 1.0)
                optimizer.step()
            stepped(named, optimizer, step, comm.rank)
        return [p.detach().clone() for _, p in named], optimizer.skipped

    plain, skipping = (SimulatedWorld(2).run(lambda comm, how=how: body(comm, how)) for how in (False, True))
    for (one, none), (other, skipped) in zip(plain, skipping, strict=True):
        assert (none, skipped) == (0, 1)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
