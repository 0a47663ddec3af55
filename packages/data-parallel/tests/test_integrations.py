"""What adapters for frameworks do before any step, without the frameworks; tests-ecosystem trains with them."""

import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from communicators import SimulatedWorld
from data_parallel import UpdateOptimizer

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


@pytest.mark.parametrize("at", ["on_after_backward", "on_train_batch_end", "on_exception", "on_substep_end"])
def test_a_callback_between_two_backwards_sees_the_parameters_of_all_ranks(callbacks, at):
    """In mid-accumulation, where step() is not there to restore them."""
    lightning, transformers = callbacks("lightning"), callbacks("transformers")

    def parameters(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = UpdateOptimizer.for_model(torch.optim.SGD(model.parameters(), 0.1), model, density=0.1, comm=comm)
        trainer = transformers.Trainer()
        trainer.optimizer, trainer.optimizers = optimizer, [optimizer]
        for step in range(2):
            optimizer.zero_grad()
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(comm.size * step + comm.rank))
            model(inputs).square().sum().backward()
            if not step:
                optimizer.step()
        assert optimizer.is_ahead
        if at == "on_substep_end":
            transformers.DistributedOptimizers(trainer).on_substep_end()
        else:
            getattr(lightning.DistributedOptimizers(), at)(trainer, SimpleNamespace(automatic_optimization=True))
        assert not optimizer.is_ahead
        return model.weight.tolist()

    first, other = SimulatedWorld(2).run(parameters)
    assert first == other


def test_lightning_leaves_several_backwards_of_one_forward_alone(callbacks):
    trained = SimpleNamespace(optimizers=None)
    callbacks("lightning").DistributedOptimizers().on_after_backward(
        trained, SimpleNamespace(automatic_optimization=False)
    )
