"""MuLoCo: DiLoCo with Muon inside and the change of a block in two bits; its laws on a model of many shapes."""

from functools import partial

import pytest
import torch
from communicators import SimulatedWorld
from local_sgd import DiLoCo
from replicas import MuonAdamW
from torch import nn

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
PLAIN = partial(torch.optim.SGD, lr=1.0)


def begin(comm, *, sync_every=2, **settings):
    """Hidden matrices of one element, one row and an odd size, a convolution, a norm, an output layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(1, 1), nn.Linear(1, 37), nn.Linear(37, 61), nn.LayerNorm(61), nn.Linear(61, 3)]
    model = nn.ModuleList([*layers[:-1], nn.Conv1d(2, 3, 3), layers[-1]])
    optimizer = DiLoCo(
        MuonAdamW(model, lr=0.02, weight_decay=0.0),
        comm=comm,
        model=model,
        sync_every=sync_every,
        compress="int2",
        **settings,
    )
    return model, optimizer


def step(model, optimizer, number, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * (number % 3 > 0)  # and zeros
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def residual(model, optimizer):
    held = optimizer.state_dict()["distributed"]["residuals"]["parts"]
    return torch.cat([held[name].reshape(-1) for name, _ in model.named_parameters()])


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_ranks_agree_and_what_is_sent_and_what_stays_are_what_was_given(ranks):
    """With outer rate 1, momentum 0: Σ (x − z) + Σ e before = P·(z′ − z) + Σ e after."""

    def body(comm):
        model, optimizer = begin(comm, outer=PLAIN, sync_every=1)
        history, z, kept = [], flat(model), torch.zeros(flat(model).numel())
        for number in range(8):
            step(model, optimizer, number, comm.rank)
            given = flat(model).double() - z + kept
            optimizer.average()
            before, z, kept = z, flat(model), residual(model, optimizer)
            history.append((given, z.double() - before, kept.double(), z))
        return history

    for one in zip(*SimulatedWorld(ranks).run(body), strict=True):
        given, moved, kept, z = zip(*one, strict=True)
        assert all(torch.equal(other, z[0]) for other in z)
        torch.testing.assert_close(ranks * moved[0] + sum(kept), sum(given), rtol=0, atol=2e-6 * ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_goes_on_with_the_same_bits(ranks, saved):
    """From the middle of a block, with the moments of both optimizers."""

    def body(comm, stop):
        model, optimizer = begin(comm)
        for number in range(9):
            if number == stop:
                weights, state = model.state_dict(), saved(optimizer.state_dict())
                model, optimizer = begin(comm)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            step(model, optimizer, number, comm.rank)
            optimizer.average()
        optimizer.finish()
        return flat(model)

    straight, resumed = (SimulatedWorld(ranks).run(partial(body, stop=stop)) for stop in (None, 5))
    assert all(torch.equal(one, straight[0]) for one in [*straight, *resumed])


def test_on_one_rank_it_is_the_optimizer_inside():
    """Outer rate 1 without momentum: the model is where the rank went."""

    def body(comm):
        model, optimizer = begin(comm, outer=PLAIN)
        alone, _ = begin(comm)
        inner = MuonAdamW(alone, lr=0.02, weight_decay=0.0)
        for number in range(6):
            step(model, optimizer, number, 0)
            optimizer.average()
            step(alone, inner, number, 0)
        return flat(model), flat(alone)

    [(model, alone)] = SimulatedWorld(1).run(body)
    torch.testing.assert_close(model, alone, rtol=0, atol=1e-6)
