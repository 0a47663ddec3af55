"""`ahead()`: gradients where a rank would be, had its own updates been applied."""

import copy

import pytest
import torch
from communicators import SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import DistributedOptimizer
from sparse_compress import WarmUp
from torch import nn

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
    return model, DistributedOptimizer(inner, model.named_parameters(), comm=comm, sends="updates", **options)


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


def test_gradients_that_are_sent_have_nothing_to_be_ahead_by():
    model = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    with pytest.raises(RuntimeError, match='for sends="updates"'):
        optimizer.ahead()


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
