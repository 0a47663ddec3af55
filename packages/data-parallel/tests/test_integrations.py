"""What adapters for frameworks do before any step, without the frameworks; tests-ecosystem trains with them."""

import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.quick

TAKEN = {
    "lightning": {"lightning.pytorch": ["Callback", "LightningModule", "Trainer"]},
    "transformers": {
        "transformers": ["Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"]
    },
}
"""Classes that our modules take of each framework."""


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


def test_lightning_forgets_what_an_evaluation_has_read(callbacks):
    callback = callbacks("lightning").SparseGradients(density=0.1)
    trained = SimpleNamespace(world_size=1)  # where a state that was read would be loaded, and fail
    callback.setup(trained, None, "validate")
    callback.load_state_dict({"of": "a checkpoint"})
    callback.setup(trained, None, "fit")
    callback.on_fit_start(trained, None)
    assert callback.state is None
