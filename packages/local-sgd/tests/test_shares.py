"""Ranks with unequal shares in the sums: the model is the same for all, and nothing of the training changes."""

import copy
from functools import partial

import pytest
import torch
from communicators import Link, SimulatedWorld
from local_sgd import CoCoDSGD, DiLoCo, LocalSGD, OverlapLocalSGD, SparseLoCo, StreamingDiLoCo
from partial_collectives import PartialAllreduce
from sparse_collectives import sparse_allreduce
from sparse_compress import ErrorFeedback, TopK

pytestmark = pytest.mark.quick

SIZE, STEPS = 3, 7
WAYS = {
    "LocalSGD": LocalSGD,
    "OverlapLocalSGD": OverlapLocalSGD,
    "CoCoDSGD": CoCoDSGD,
    "DiLoCo": DiLoCo,
    "StreamingDiLoCo": partial(StreamingDiLoCo, fragments=2, delay=1),
}


def trained(make, shares, **settings):
    """Parameters of every rank after some blocks."""

    def on_rank(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        model = torch.nn.Linear(40, 30)
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.zeros_(model.bias)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = make(sgd, comm=comm, sync_every=2, shares=shares, **settings)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(5, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.average()
        optimizer.finish()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), comm.bytes_sent

    return SimulatedWorld(SIZE, Link(1e-3, 1e-6)).run(on_rank)


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_the_same_on_all_ranks_and_near_that_of_equal_shares(way):
    found = trained(WAYS[way], [0.0, 0.25, 0.75])
    assert all(torch.equal(model, found[0][0]) for model, _ in found)
    usual = trained(WAYS[way], None)
    assert torch.allclose(found[0][0], usual[0][0], atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_do_not_depend_on_the_shares(way):
    one, other = trained(WAYS[way], [0.0, 0.25, 0.75]), trained(WAYS[way], [1 / 3] * 3)
    assert all(torch.equal(model, other[0][0]) for model, _ in one)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_goes_on_with_other_shares_and_the_same_bits(way):
    """Saved in the middle of a block."""

    def on_rank(comm, shares):
        generator = torch.Generator().manual_seed(comm.rank)
        inputs = torch.randn(STEPS, 5, 40, generator=generator)
        saved = None
        for part, own in zip((inputs[:3], inputs[3:]), shares, strict=True):
            model = torch.nn.Linear(40, 30)
            torch.nn.init.constant_(model.weight, 0.1)
            torch.nn.init.zeros_(model.bias)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = WAYS[way](sgd, comm=comm, sync_every=2, shares=own)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for batch in part:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.average()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.finish()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    one, other = [0.0, 0.25, 0.75], [0.5, 0.5, 0.0]
    kept = SimulatedWorld(SIZE).run(lambda comm: on_rank(comm, [one, one]))
    changed = SimulatedWorld(SIZE).run(lambda comm: on_rank(comm, [one, other]))
    assert all(torch.equal(model, kept[0]) for model in [*kept, *changed])


def test_who_has_no_share_sends_half_as_much():
    sent = [nbytes for _, nbytes in trained(LocalSGD, [0.0, 0.5, 0.5], broadcast=False)]
    assert sent[0] < 0.75 * sent[1]


WRONG = [
    (LocalSGD, {"shares": [0.5, 0.5]}, "expected 3 shares"),
    (LocalSGD, {"shares": [1 / 3] * 3, "native": True}, "shares are of our own sum"),
    (SparseLoCo, {"shares": [1 / 3] * 3}, "shares are of a sum in full precision, and chunks"),
    (partial(DiLoCo, compress="int8"), {"shares": [1 / 3] * 3}, "int8 has another"),
    (
        partial(DiLoCo, compress=ErrorFeedback(TopK(0.1)), allreduce=lambda sent, comm: sparse_allreduce(sent, comm)),
        {"shares": [1 / 3] * 3},
        "ErrorFeedback has another",
    ),
    (partial(DiLoCo, allreduce=partial(PartialAllreduce, quorum="majority")), {"shares": [1 / 3] * 3}, "shares"),
]


@pytest.mark.parametrize(("make", "settings", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_shares_that_would_have_no_effect_are_refused(make, settings, said):
    def on_rank(comm):
        sgd = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
        with pytest.raises(ValueError, match=said):
            make(sgd, comm=comm, **settings)

    SimulatedWorld(SIZE).run(on_rank)


@pytest.mark.parametrize("wrong", [0.5, "abc", torch.ones(3) / 3], ids=["number", "text", "tensor"])
def test_shares_that_are_no_list_are_told(wrong):
    with pytest.raises(TypeError, match="expected a list of numbers, such as shares_by_rate gives"):
        LocalSGD(torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1), shares=wrong)


def test_ranks_with_other_shares_are_told():
    def on_rank(comm):
        sgd = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
        LocalSGD(sgd, comm=comm, shares=[0.5, 0.5] if comm.rank else [0.0, 1.0])

    with pytest.raises(Exception, match="shares"):
        SimulatedWorld(2).run(on_rank)
