"""Mutated checkpoints of every wrapper: loaded, or refused by an error with a name that leaves all as it was."""

import copy
import io
import random
import re
from functools import partial

import pytest
import torch
from communicators import CollectiveError
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer
from local_sgd import (
    BMUF,
    EASGD,
    CoCoDSGD,
    DeMo,
    DiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from mutants import Tally, equal, mutated_state, saved
from partial_collectives import EagerSGD, PartialAllreduce
from torch import nn


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def named(make, inner=sgd, **settings):
    return lambda model: make(inner(model), model.named_parameters(), **settings)


def local(make, inner=sgd, **settings):
    return lambda model: make(inner(model), model=model, **settings)


def eager(model):
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)
    return EagerSGD(inner, model.named_parameters(), scheduler=scheduler)


MADE = {
    "DistributedOptimizer": named(DistributedOptimizer, density=0.5),
    "DistributedOptimizer, momentum": named(DistributedOptimizer, adam, density=0.5, momentum=0.9),
    "DistributedOptimizer, oktopk": named(DistributedOptimizer, density=0.5, algorithm="oktopk"),
    "DistributedOptimizer, powersgd": named(DistributedOptimizer, algorithm="powersgd"),
    "DistributedOptimizer, int8": named(DistributedOptimizer, algorithm="dense-int8"),
    "UpdateOptimizer": named(UpdateOptimizer, adam, density=0.5),
    "EagerSGD": eager,
    "LocalSGD": local(LocalSGD, sync_every=2),
    "OverlapLocalSGD": local(OverlapLocalSGD, sync_every=2),
    "CoCoDSGD": local(CoCoDSGD, sync_every=2),
    "BMUF": local(BMUF, sync_every=2),
    "SlowMo": local(SlowMo, adam, sync_every=2),
    "EASGD": local(EASGD, sync_every=2),
    "DiLoCo": local(DiLoCo, adam, sync_every=2),
    "DiLoCo, int8": local(DiLoCo, sync_every=2, compress="int8"),
    "StreamingDiLoCo": local(StreamingDiLoCo, sync_every=4, fragments=2, delay=1),
    "SparseLoCo": local(SparseLoCo, sync_every=2),
    "DeMo": local(DeMo, sync_every=2),
    "DiLoCo by rounds": local(DiLoCo, sync_every=2, allreduce=PartialAllreduce),
}
CASES = 1900 // (len(MADE) + 2)
NAMED_LATER = (
    r"are not finite|is not finite|the parameters are not those that the loaded state was saved with|capturable"
)
"""Errors of the step after a load: values that may stand in a sound state."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()


def step_or_told(model, optimizer):
    try:
        train(model, optimizer, 1)
    except (CollectiveError, RuntimeError, AssertionError) as error:
        if not re.search(NAMED_LATER, str(error)):
            raise


def everything(model, optimizer):
    """Copy of all state."""
    parts = [optimizer, getattr(optimizer, "optimizer", optimizer), model]
    return copy.deepcopy([part.state_dict() for part in parts])


def check(name, state, fresh, *, steps=True, named=(ValueError, TypeError)):
    """Loads mutants of a state into what `fresh` makes: model and optimizer, or whatever else loads it."""
    dice, tally = random.Random(name), Tally(*named)
    model, one = fresh()
    before = everything(model, one)
    for _ in range(CASES):
        load = partial(one.load_state_dict, mutated_state(state, dice))
        if tally.attempt(load, name):
            if steps:
                tally.attempt(partial(step_or_told, model, one), f"{name}, then a step")
                tally.taken -= 1
            model, one = fresh()
        elif not equal(before, everything(model, one)):
            tally.note(f"{name}: a refused state has changed something: {load.args[0]}")
    tally.check(CASES)


@pytest.fixture(scope="module")
def trained():
    """Model and optimizer by name, after three steps; made once."""
    made = {}

    def trained(name):
        if name not in made:
            model = network()
            train(model, optimizer := MADE[name](model), 3)
            getattr(optimizer, "average", int)()  # a state is saved after it
            made[name] = torch.load(io.BytesIO(saved([model.state_dict(), optimizer.state_dict()])), weights_only=True)
        return made[name]

    return trained


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE)
def test_states(name, trained):
    weights, state = trained(name)

    def fresh():
        model = network()
        model.load_state_dict(weights)
        return model, MADE[name](model)

    fresh()[1].load_state_dict(state)  # sound
    check(name, state, fresh)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE)
def test_a_state_stays_as_it_was_whoever_goes_on_from_it(name):
    """torch's own optimizers go on in its tensors: who loads it a second time finds another one."""

    def begun():
        model = network()
        return model, MADE[name](model)

    def steps(model, optimizer, count):
        for _ in range(count):
            train(model, optimizer, 1)
            getattr(optimizer, "average", lambda: None)()

    steps(*(first := begun()), 3)
    weights, state = copy.deepcopy([part.state_dict() for part in first])
    before, (model, optimizer) = copy.deepcopy(state), begun()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    steps(model, optimizer, 5)
    assert equal(state, before)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
def test_states_of_the_hook(trained):
    _, state = trained("DistributedOptimizer")

    def fresh():
        model = network()
        return model, SparseHookState(density=0.5, named_parameters=model.named_parameters())

    check(
        "SparseHookState",
        {"distributed": state["distributed"]},
        fresh,
        steps=False,
        named=(ValueError, TypeError, RuntimeError),
    )


@pytest.mark.filterwarnings("ignore")
def test_gathered_states(trained):
    weights, state = trained("LocalSGD")
    gathered = {**state, "distributed": {"world_size": 1, "ranks": [{"distributed": state["distributed"]}]}}

    def fresh():
        model = network()
        model.load_state_dict(weights)
        return model, MADE["LocalSGD"](model)

    check("gathered", gathered, fresh)
