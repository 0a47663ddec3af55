"""What adapters for frameworks do before any step, without the frameworks; tests-ecosystem trains with them."""

import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from communicators import Alone
from data_parallel import DistributedOptimizer, UpdateOptimizer
from data_parallel.integrations.attaching import hooked, left_to_optimizers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.quick

TAKEN = {
    "lightning": {"lightning.pytorch": ["Callback", "LightningModule", "Trainer"]},
    "transformers": {
        "transformers": ["Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"]
    },
}
"""Classes that our modules take of each framework."""


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def callbacks(monkeypatch):
    """callbacks(framework) -> our module of callbacks, over empty classes in place of the framework's."""

    def of(framework):
        for name, classes in {framework: [], **TAKEN[framework]}.items():
            module = ModuleType(name)
            vars(module).update({each: type(each, (), {}) for each in classes})
            monkeypatch.setitem(sys.modules, name, module)
        spec = importlib.util.find_spec(f"data_parallel.integrations.{framework}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return of


@pytest.mark.parametrize("kind", ["SparseGradients", "DistributedOptimizers"])
def test_one_rank_is_told_that_nothing_is_exchanged(callbacks, kind, caplog):
    lightning, transformers = callbacks("lightning"), callbacks("transformers")
    trainer, alone = transformers.Trainer(), SimpleNamespace(world_size=1)
    trainer.training_step = None
    with caplog.at_level(logging.INFO):
        getattr(lightning, kind)().on_fit_start(alone, None)
        getattr(transformers, kind)(trainer).on_train_begin(alone, None, None)
    assert caplog.messages == ["one rank: nothing is exchanged", "one process: nothing is exchanged"]


@pytest.mark.parametrize("kind", ["SparseGradients", "DistributedOptimizers"])
def test_what_is_no_trainer_is_refused(callbacks, kind):
    with pytest.raises(TypeError, match=rf"trainer is 3: trainer\.add_callback\({kind}\(trainer, \.\.\.\)\)"):
        getattr(callbacks("transformers"), kind)(3)


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def exchanging(model, kind=DistributedOptimizer):
    return kind(plain(model), model.named_parameters(), comm=Alone())


def wrapped(model):
    """As a framework wraps it."""
    return SimpleNamespace(optimizer=exchanging(model, UpdateOptimizer))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("other", [exchanging, wrapped])
def test_the_hook_exchanges_for_plain_optimizers_alone(other):
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="exchanges by itself: take DistributedOptimizers"):
        hooked(ddp, [plain(ddp.module), other(ddp.module)], {}, grad_scaler=None, how="")
    state = hooked(ddp, [plain(ddp.module)], {"density": 0.5}, grad_scaler=None, how="")
    ddp(torch.ones(1, 3)).sum().backward()
    assert state.stats()["steps"] == 1


@pytest.mark.usefixtures("group")
def test_ddp_leaves_the_exchange_to_optimizers_where_all_have_one():
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ours, theirs = exchanging(ddp.module), wrapped(ddp.module)
    for optimizers in ([], [plain(ddp.module)], [ours, plain(ddp.module)]):
        with pytest.raises(TypeError, match="expected DistributedOptimizer or UpdateOptimizer for each"):
            left_to_optimizers(ddp, optimizers, how="")
    assert left_to_optimizers(ddp, [ours, theirs], how="") == [ours, theirs.optimizer]
