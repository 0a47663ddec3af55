"""Muon and AdamW as one optimizer: torch's own steps, split by what a parameter is; states, schedulers, copies."""

import copy
import pickle

import pytest
import torch
from replicas import MuonAdamW
from replicas.muon_adamw import hidden_matrices
from torch import nn

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9"),
]


class Net(nn.Module):
    """An embedding, learned positions, a hidden layer, a norm, an output layer."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding, self.places = nn.Embedding(7, 6), nn.Parameter(torch.randn(3, 6))
        self.hidden, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embedding(tokens) + self.places)))


def backward(model, step):
    tokens = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(tokens).square().mean().backward()


@pytest.mark.parametrize(
    ("tied", "adamw", "expected"),
    [
        (False, None, ["places", "hidden.weight"]),
        (True, None, ["places", "hidden.weight"]),
        (False, ("places", "head"), ["hidden.weight"]),
        (False, ("places",), ["hidden.weight", "head.weight"]),
        (False, "places", ["hidden.weight", "head.weight"]),
        (False, (), ["places", "hidden.weight", "head.weight"]),
        (True, (), ["places", "hidden.weight"]),
        (False, ("hidden.bias", "head.weight"), ["places", "hidden.weight"]),
    ],
)
def test_which_parameters_are_hidden_matrices(tied, adamw, expected):
    model = Net(tied=tied)
    assert hidden_matrices(model, adamw) == set(expected)
    muon, other = MuonAdamW(model, adamw=adamw).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in muon["params"]] == muon["param_names"] == expected
    assert len(muon["params"]) + len(other["params"]) == len(names)


def test_steps_are_those_of_torchs_two_optimizers():
    torch.manual_seed(0)
    model, same = Net(), Net()
    same.load_state_dict(model.state_dict())
    ours = MuonAdamW(
        model, lr=0.01, weight_decay=0.2, momentum=0.8, betas=(0.7, 0.9), eps=1e-6, adamw=["places", "head"]
    )
    others = [p for name, p in same.named_parameters() if name != "hidden.weight"]
    theirs = [
        torch.optim.Muon([same.hidden.weight], 0.01, 0.2, 0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.01, (0.7, 0.9), 1e-6, 0.2),
    ]
    schedule = torch.optim.lr_scheduler.StepLR(ours, 2, 0.5)
    for step in range(5):
        backward(model, step)
        backward(same, step)
        ours.step()
        for one in theirs:
            one.step()
            one.param_groups[0]["lr"] = 0.01 * 0.5 ** ((step + 1) // 2)
        schedule.step()
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_matrix_moves_as_far_as_adamw_would_move_it():
    """Root mean square of a step about 0.2 times the rate, whatever the gradient's size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2))
    for size in (1e-6, 1e6):
        before = model[0].weight.detach().clone()
        model[0].weight.grad = size * torch.randn(32, 64)
        MuonAdamW(model, lr=0.1, weight_decay=0.0).step()
        assert 0.8 < float((model[0].weight.detach() - before).square().mean().sqrt()) / (0.1 * 0.2) < 1.2


@pytest.mark.parametrize("way", ["load", "deepcopy", "pickle", "assigned"])
def test_it_goes_on_with_the_same_bits(way, tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = MuonAdamW(model, lr=0.01)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    if way == "load":
        other = Net()
        other.load_state_dict(model.state_dict())
        again = MuonAdamW(other, lr=0.5)
        torch.save(optimizer.state_dict(), tmp_path / "state")
        again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    elif way == "assigned":
        other, again = copy.deepcopy((model, optimizer))
        again.state = copy.copy(again.state)
    else:
        other, again = (copy.deepcopy if way == "deepcopy" else lambda both: pickle.loads(pickle.dumps(both)))(
            (model, optimizer)
        )
    for step in range(3, 6):
        for one, its in ((model, optimizer), (other, again)):
            backward(one, step)
            its.step()
    assert len(again.state) == len(list(other.parameters()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_state_of_other_groups_is_refused_and_changes_nothing():
    """Torch takes states by position, so that moments of other matrices would be loaded."""
    optimizer = MuonAdamW(Net(), lr=0.5)
    others = [MuonAdamW(Net(), adamw=["hidden"]), torch.optim.AdamW(Net().parameters())]
    others.append(torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups]))
    for other in others:
        with pytest.raises(ValueError, match=r"the state is of groups of parameters .*, but this MuonAdamW has"):
            optimizer.load_state_dict(other.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (0, 3)])
def test_tiny_matrices_and_gradients_of_zero(dtype, shape):
    rows, columns = shape
    model = nn.ModuleList([nn.Linear(columns, rows), nn.Linear(2, 2)]).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    MuonAdamW(model, lr=0.1, weight_decay=0.0).step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_nan_stays_in_its_matrix():
    model = Net()
    optimizer = MuonAdamW(model)
    backward(model, 0)
    model.hidden.weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert [name for name, p in model.named_parameters() if not p.isfinite().all()] == ["hidden.weight"]


def test_a_closure_and_frozen_parameters():
    model = Net()
    model.places.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = MuonAdamW(model)

    def closure():
        backward(model, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]


def test_what_it_cannot_train_is_said(monkeypatch):
    with pytest.raises(ValueError, match=r"no hidden matrix: .*; take AdamW alone"):
        MuonAdamW(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"adamw names \['hea'\], but the model has no such"):
        MuonAdamW(Net(), adamw=["hea", "places"])
    with pytest.raises(ValueError, match="make a new one"):
        MuonAdamW(Net()).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match=r"came with torch 2\.9, and this is torch"):
        MuonAdamW(Net())
