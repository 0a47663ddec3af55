"""What is plainly no state of a wrapper is one clear error of whatever loads it, and changes nothing."""

import pytest
import torch
from data_parallel import DistributedOptimizer, SparseHookState
from local_sgd import LocalSGD, OverlapLocalSGD
from partial_collectives import EagerSGD
from torch import nn

pytestmark = pytest.mark.quick


def wrapped(make):
    model = nn.Linear(3, 2)
    return make(torch.optim.SGD(model.parameters(), lr=0.1), model)


LOADERS = {
    "DistributedOptimizer": lambda: wrapped(lambda inner, model: DistributedOptimizer(inner, model.named_parameters())),
    "SparseHookState": lambda: SparseHookState(density=0.5),
    "EagerSGD": lambda: wrapped(lambda inner, model: EagerSGD(inner, model.named_parameters())),
    "LocalSGD": lambda: wrapped(lambda inner, model: LocalSGD(inner, model=model)),
    "OverlapLocalSGD": lambda: wrapped(lambda inner, model: OverlapLocalSGD(inner, model=model)),
}
PLAIN = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1).state_dict()
WRONG = {
    "none": (None, TypeError, "a state is None, expected"),
    "a list": ([], TypeError, r"a state is \[\], expected"),
    "a path": ("rank0.pt", TypeError, "a state is 'rank0.pt', expected"),
    "empty": ({}, ValueError, r"an empty state given.*gathered_state_dict\(\) gives the whole one to rank 0 alone"),
    "a plain optimizer's": (PLAIN, ValueError, "keys.*param_groups.*give a plain optimizer's state to the wrapped"),
    "a model's": (nn.Linear(3, 2).state_dict(), ValueError, "a state with the keys .*weight.* given, expected one of"),
    "nothing in it": ({"distributed": None}, ValueError, "part 'distributed' of the state is None, expected"),
    "no part": ({"distributed": [1, 2]}, ValueError, r"part 'distributed' of the state is \[1, 2\], expected"),
    "another library's": ({"distributed": {"ranks": 3}}, ValueError, r"the state lacks \['rank', 'world_size'"),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_state_is_said_so(loader, wrong):
    state, error, says = WRONG[wrong]
    one = LOADERS[loader]()
    with pytest.raises(error, match=says):
        one.load_state_dict(state)
    one.load_state_dict(one.state_dict())
    getattr(one, "close", lambda: None)()
