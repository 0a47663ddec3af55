"""`ahead()`: gradients where a rank would be, had its own updates been applied."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from communicators import SimulatedWorld
from data_parallel import UpdateOptimizer, adam_step_correction, lookahead
from data_parallel.adam_step_correction import in_batches
from hypothesis import given
from hypothesis import strategies as st
from sparse_compress import WarmUp
from torch import nn

pytestmark = pytest.mark.quick

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
}
DENSITIES = st.sampled_from([0.02, 0.3, 1.0, WarmUp(0.05, 3), lambda step: 1.0 if step % 2 else 0.1])


def made(comm, optimizer, *, dtype=torch.float32, **options):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    inner = OPTIMIZERS[optimizer](model.parameters())
    return model, UpdateOptimizer(inner, model.named_parameters(), comm=comm, **options)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 6, generator=generator).to(dtype)).square().mean()


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def waiting(optimizer):
    return flat(optimizer.state_dict()["distributed"]["residuals"].values())


@given(optimizer=st.sampled_from(["adamw", "momentum"]), density=DENSITIES, below=st.sampled_from([0, 6]))
def test_one_rank_at_any_density_is_the_wrapped_optimizer_within_rounding(optimizer, density, below):
    """Parameters + what waits are those of a training without any selection, weight decay and all."""

    def body(comm):
        model, wrapper = made(comm, optimizer, density=density, dense_below=below, dtype=torch.float64)
        plain = copy.deepcopy(model)
        alone = OPTIMIZERS[optimizer](plain.parameters())
        for step in range(6):
            wrapper.zero_grad()
            with wrapper.ahead():
                loss_of(model, 0, step).backward()
            wrapper.step()
            alone.zero_grad()
            loss_of(plain, 0, step).backward()
            alone.step()
        return flat(model.parameters()) + waiting(wrapper), flat(plain.parameters())

    torch.testing.assert_close(*SimulatedWorld(1).run(body)[0], rtol=1e-9, atol=1e-12)


@given(size=st.sampled_from([2, 3, 5]), density=DENSITIES, seed=st.integers(0, 99))
def test_the_mean_of_where_ranks_are_has_had_every_update_and_outside_all_are_alike(size, density, seed):
    """With integer gradients and SGD at lr 1: Σ (parameters + what waits) = P · start − Σ gradients, exactly."""

    def body(comm):
        model, optimizer = made(comm, "sgd", density=density)
        with torch.no_grad():
            for p in model.parameters():
                p.round_()
        start, given = flat(model.parameters()), 0
        generator = torch.Generator().manual_seed(10 * seed + comm.rank)
        for _ in range(4):
            with optimizer.ahead():
                for p in model.parameters():
                    p.grad = torch.randint(-9, 10, p.shape, generator=generator).float() * size
            given = given + flat(p.grad for p in model.parameters())
            optimizer.step()
        with optimizer.ahead():
            inside = flat(model.parameters())
        return size * start, given, inside, flat(model.parameters())

    results = SimulatedWorld(size).run(body)
    start = results[0][0]
    assert torch.equal(sum(inside for _, _, inside, _ in results), start - sum(given for _, given, _, _ in results))
    assert all(torch.equal(outside, results[0][3]) for *_, outside in results)


@pytest.mark.parametrize("raises", [False, True])
def test_outside_parameters_have_their_bits_again(raises):
    def body(comm):
        model, optimizer = made(comm, "adamw", density=0.1, dtype=torch.bfloat16)
        for step in range(3):
            with optimizer.ahead():
                loss_of(model, comm.rank, step).backward()
            optimizer.step()
        before = flat(model.parameters())
        try:
            with optimizer.ahead():
                assert not torch.equal(flat(model.parameters()), before)
                if raises:
                    raise KeyError
        except KeyError:
            pass
        assert torch.equal(flat(model.parameters()), before)

    SimulatedWorld(2).run(body)


def test_a_closure_is_called_there():
    def body(comm, closure):
        model, optimizer = made(comm, "adamw", density=0.1)
        for step in range(4):
            optimizer.zero_grad()
            if closure:
                optimizer.step(lambda step=step: loss_of(model, comm.rank, step).backward())
                continue
            with optimizer.ahead():
                loss_of(model, comm.rank, step).backward()
            optimizer.step()
        return flat(model.parameters())

    assert torch.equal(*(SimulatedWorld(2).run(lambda comm, c=c: body(comm, c))[0] for c in (False, True)))


def test_gradients_that_know_nothing_of_what_waits_are_warned_about_once():
    def body(comm):
        model, optimizer = made(comm, "adamw", density=0.02)
        loss_of(model, 0, 0).backward()
        with pytest.warns(UserWarning, match=r"waits about 50 steps.*with optimizer.ahead"):
            optimizer.step()
        optimizer.step()

    SimulatedWorld(1).run(body)


def test_at_density_1_nothing_waits_and_nobody_is_warned():
    def body(comm):
        model, optimizer = made(comm, "adamw", density=1.0)
        loss_of(model, 0, 0).backward()
        optimizer.step()

    SimulatedWorld(1).run(body)


@pytest.mark.parametrize("call", ["step", "state_dict", "load_state_dict"])
def test_what_belongs_to_all_ranks_is_refused_inside(call):
    def body(comm):
        _, optimizer = made(comm, "adamw")
        state = optimizer.state_dict()
        with optimizer.ahead(), pytest.raises(RuntimeError, match="inside ahead"):
            getattr(optimizer, call)(*([state] if call == "load_state_dict" else []))
        with optimizer.ahead(), pytest.raises(RuntimeError, match=r"ahead\(\) inside ahead"), optimizer.ahead():
            pass

    SimulatedWorld(1).run(body)


@pytest.mark.parametrize("kept", [False, True])
def test_a_forward_inside_whose_backward_is_outside_is_told_before_torch_fails(kept):
    """torch says "modified by an inplace operation", and not by whom. kept: gradients of the step before."""
    model, optimizer = made(None, "sgd", density=0.1)
    if kept:
        with optimizer.ahead():
            loss_of(model, 0, 0).backward()
        optimizer.step()
    said = r"inside ahead\(\), but no gradient.*forward and backward"
    with pytest.warns(UserWarning, match=said) as caught, optimizer.ahead():
        loss = loss_of(model, 0, 1)
    assert caught[0].filename == __file__
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_block_that_makes_gradients_otherwise_or_computes_none_is_not():
    model, optimizer = made(None, "sgd", density=0.1)
    parameters = list(model.parameters())
    with optimizer.ahead(), torch.no_grad():
        loss_of(model, 0, 0)
    with optimizer.ahead():
        gradients = torch.autograd.grad(loss_of(model, 0, 0), parameters)
    with optimizer.ahead():
        loss_of(model, 0, 0)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    with optimizer.ahead():
        loss_of(model, 0, 0)
        parameters[0].grad.mul_(2)


def test_what_is_written_inside_is_an_error_and_parameters_are_put_back():
    def body(comm):
        model, optimizer = made(comm, "adamw", density=0.1)
        before = flat(model.parameters())
        with pytest.raises(RuntimeError, match=r"'2\.bias' was written to inside ahead"), optimizer.ahead():  # noqa: PT012
            loss_of(model, comm.rank, 0).backward()
            with torch.no_grad():
                model[2].bias.clamp_(-0.01, 0.01)
        assert torch.equal(flat(model.parameters()), before)
        optimizer.step()

    SimulatedWorld(2).run(body)


@pytest.mark.parametrize(("optimizer", "share"), [("sgd", 1.0), ("momentum", 1.0), ("adamw", 1 / 4)])
def test_how_far_ahead_a_rank_goes(optimizer, share):
    """By all of its residual with SGD; with Adam, of which most is noise, by its part of the mean."""

    def body(comm):
        model, wrapper = made(comm, optimizer, density=0.1, dtype=torch.float64)
        for step in range(4):
            with wrapper.ahead():
                loss_of(model, comm.rank, step).backward()
            wrapper.step()
        before, waits = flat(model.parameters()), waiting(wrapper)
        with wrapper.ahead():
            moved = flat(model.parameters()) - before
        assert float(waits.norm()) > 0
        torch.testing.assert_close(moved, share * waits, rtol=1e-9, atol=1e-12)

    SimulatedWorld(4).run(body)


def said_in(step):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(one.message) for one in caught]


def test_a_backward_outside_beside_one_inside_is_warned_about_once():
    model, optimizer = made(None, "sgd", density=0.1)
    said = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        with optimizer.ahead():
            loss_of(model, 0, step + 10).backward()
        said += said_in(optimizer.step)
    assert len(said) == 1
    assert "of this step some gradients were made inside ahead(), others outside" in said[0]


THROWN_AWAY = {
    "none": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by optimizer": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", THROWN_AWAY)
def test_gradients_that_were_thrown_away_were_not_made_outside(how, inside):
    """Such as those that a generator's loss leaves in the discriminator of a GAN."""
    model, optimizer = made(None, "sgd", density=0.1)
    loss_of(model, 0, 0).backward()
    with optimizer.ahead():
        pass  # hooks are there from now on
    loss_of(model, 0, 0).backward()
    if not inside:
        THROWN_AWAY[how](model, optimizer)
    with optimizer.ahead():
        if inside:
            THROWN_AWAY[how](model, optimizer)
        for step in range(2):
            loss_of(model, 0, step).backward()
    assert not said_in(optimizer.step)


@pytest.mark.parametrize("how", THROWN_AWAY)
def test_gradients_thrown_away_of_what_the_step_does_not_use_were_not_made_outside(how):
    """Such as those of a probe, or of a head that another task trains."""
    model, optimizer = made(None, "sgd", density=0.1)
    with optimizer.ahead():
        loss_of(model, 0, 0).backward()
    optimizer.step()
    THROWN_AWAY[how](model, optimizer)
    loss_of(model, 0, 1).backward()
    THROWN_AWAY[how](model, optimizer)
    with optimizer.ahead():
        model[0](torch.ones(1, 6)).sum().backward()  # model[2] has no backward
    assert not said_in(optimizer.step)


@pytest.mark.parametrize("before", [False, True])
def test_gradients_that_never_reach_grad_were_not_made_outside(before):
    """`torch.autograd.grad`, such as of a norm that is logged."""
    model, optimizer = made(None, "sgd", density=0.1)
    for step in range(2):
        optimizer.zero_grad()
        if before:
            torch.autograd.grad(loss_of(model, 0, step), list(model.parameters()))
        with optimizer.ahead():
            loss_of(model, 0, step).backward()
        if not before:
            torch.autograd.grad(loss_of(model, 0, step), list(model.parameters()))
        assert not said_in(optimizer.step)


def test_at_density_1_nothing_waits_so_it_is_all_the_same_where_gradients_were_made():
    model, optimizer = made(None, "sgd", density=1.0)
    loss_of(model, 0, 0).backward()
    with optimizer.ahead():
        loss_of(model, 0, 1).backward()
    assert not said_in(optimizer.step)


def test_watching_where_gradients_are_made_keeps_nothing_alive_and_leaves_the_model_copyable():
    model, optimizer = made(None, "sgd", density=0.1)
    with optimizer.ahead():
        loss_of(model, 0, 0).backward()
    watching = weakref.ref(optimizer._lookahead)
    twin = copy.deepcopy(model)
    del optimizer
    gc.collect()
    assert watching() is None
    loss_of(model, 0, 0).backward()
    loss_of(twin, 0, 0).backward()


def hooks_of(model):
    return sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_hooks_go_with_the_wrapper():
    model, optimizer = made(None, "sgd", density=0.1)
    with optimizer.ahead():
        loss_of(model, 0, 0).backward()
    assert hooks_of(model)
    del optimizer
    gc.collect()
    assert not hooks_of(model)


def test_hooks_go_after_the_warning_and_do_not_come_back():
    model, optimizer = made(None, "sgd", density=0.1)
    with optimizer.ahead():
        loss_of(model, 0, 0).backward()
    loss_of(model, 0, 1).backward()
    assert len(said_in(optimizer.step)) == 1
    assert not hooks_of(model)
    with optimizer.ahead():
        loss_of(model, 0, 2).backward()
    assert not hooks_of(model)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_hooks_go_after_steps_in_which_all_was_as_it_should_be(density):
    model, optimizer = made(None, "sgd", density=density)
    for step in range(lookahead.LOOKS):
        optimizer.zero_grad()
        with optimizer.ahead():
            loss_of(model, 0, step).backward()
        assert hooks_of(model)
        optimizer.step()
    with optimizer.ahead():
        assert not hooks_of(model)


@given(numels=st.lists(st.integers(0, 12), max_size=20))
def test_batches_hold_every_tensor_once(numels):
    tensors = [torch.zeros(numel) for numel in numels]
    before, adam_step_correction.BATCH = adam_step_correction.BATCH, 8
    try:
        batches = list(in_batches(tensors))
    finally:
        adam_step_correction.BATCH = before
    assert [id(tensor) for batch in batches for tensor in batch] == [id(tensor) for tensor in tensors]
    assert all(batch and (len(batch) == 1 or sum(tensor.numel() for tensor in batch) <= 8) for batch in batches)
