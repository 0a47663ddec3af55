"""Lightning at two ranks on CPUs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import by_hand
import pytest
import torch
import torch.distributed as dist
from by_hand import RATE, SETTINGS, UPDATES
from data_parallel import SparseHookState, UpdateOptimizer, sparse_hook
from data_parallel.integrations.lightning import DistributedOptimizers, SparseGradients
from items import collector
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

ITEMS = []
item = collector("Lightning", ITEMS)


class Digits(LightningModule):
    def __init__(self, optimizer=None):
        super().__init__()
        self.network, self.optimizer_of = by_hand.network(), optimizer

    def training_step(self, batch, number):
        return by_hand.loss_of(self.network, batch)

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        return optimizer if self.optimizer_of is None else self.optimizer_of(self)


def trainer(folder, *callbacks, epochs=2, strategy="ddp", **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **quiet,
        **options,
    )


def fitted(folder, *callbacks, optimizer=None, ckpt_path=None, save=None, **options):
    module, made = Digits(optimizer), trainer(folder, *callbacks, **options)
    made.fit(module, by_hand.loader(), ckpt_path=ckpt_path, weights_only=ckpt_path and True)
    by_hand.all_alike(module)
    if save is not None:
        made.save_checkpoint(save)
    return module


@item("the hook", "same bits as plain DDP with the hook")
def hook(folder):
    callbacks = [SparseGradients(**SETTINGS)]  # ours
    module = fitted(folder, *callbacks)
    assert by_hand.same_as_hook(module)
    assert not by_hand.same_as_hook(module, settings=None)


@item("a hook given to DDPStrategy, on a CPU", "ignored by Lightning; a state with `named_parameters` warns")
def ignored(folder):
    module = Digits()
    state = SparseHookState(named_parameters=module.named_parameters(), **SETTINGS)
    made = trainer(folder, strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=sparse_hook))
    with pytest.warns(UserWarning, match="has brought no gradient to this SparseHookState: the hook is not registered"):
        made.fit(module, by_hand.loader())


@item("accumulate_grad_batches=3", "same bits as plain DDP with no_sync()")
def accumulation(folder):
    module = fitted(folder, SparseGradients(**SETTINGS), accumulate_grad_batches=3)
    assert by_hand.same_as_hook(module, accumulate=3)


@item('precision="bf16-mixed"', "same bits as plain DDP under autocast")
def bf16(folder):
    module = fitted(folder, SparseGradients(**SETTINGS), precision="bf16-mixed")
    assert by_hand.same_as_hook(module, autocast=torch.bfloat16)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)


@item('precision="16-mixed", with a GradScaler', "same bits as plain DDP with one, steps that it skips included")
def fp16(folder):
    given = scaler()
    module = fitted(folder, SparseGradients(**SETTINGS), plugins=[MixedPrecision("16-mixed", "cpu", given)])
    other = scaler()
    assert by_hand.same_as_hook(module, autocast=torch.float16, scaler=other)
    assert given.get_scale() == other.get_scale() != 2.0**16


@item("gradient_clip_val", "after the exchange: a warning, which names clip_norm=")
def clipping(folder):
    with pytest.warns(UserWarning, match="scaled down between the exchange and step"):
        fitted(folder, SparseGradients(**SETTINGS), gradient_clip_val=0.1)


@item("clipping before the exchange", "same bits as plain DDP with clip_norm, and no warning")
def clip_norm(folder):
    callbacks = [SparseGradients(**SETTINGS, clip_norm=0.5)]  # ours
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exchange")
        module = fitted(folder, *callbacks)
    assert by_hand.same_as_hook(module, settings={**SETTINGS, "clip_norm": 0.5})


@item("fit(ckpt_path=…)", "same bits as without a stop")
def resume(folder):
    file = folder / "half.ckpt"
    fitted(folder, SparseGradients(**SETTINGS), epochs=1, save=file)
    module = fitted(folder, SparseGradients(**SETTINGS), ckpt_path=file)
    assert by_hand.same_as_hook(module, settings=SETTINGS)


@item("validate(ckpt_path=…), then fit()", "same bits as without the checkpoint")
def evaluated(folder):
    file = folder / "other.ckpt"
    fitted(folder, SparseGradients(**SETTINGS), epochs=1, save=file)
    made = trainer(folder, SparseGradients(**SETTINGS))
    made.validate(Digits(), by_hand.loader(), ckpt_path=file, weights_only=True, verbose=False)
    module = Digits()
    made.fit(module, by_hand.loader())
    assert by_hand.same_as_hook(module)


def skipping(module):
    return by_hand.updating(module, nonfinite="skip")


@item("UpdateOptimizer, with Adam", by_hand.AHEAD)
def optimizer(folder):
    def adam(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.003)
        return UpdateOptimizer.for_model(optimizer, module, **UPDATES)  # ours

    callbacks = [DistributedOptimizers()]  # ours
    file = folder / "half.ckpt"
    whole = fitted(folder, *callbacks, optimizer=adam, epochs=4)
    fitted(folder, *callbacks, optimizer=adam, epochs=2, save=file)
    module = fitted(folder, *callbacks, optimizer=adam, epochs=4, ckpt_path=file)
    assert by_hand.same_as_ahead(whole)
    assert by_hand.same(by_hand.bits(module), by_hand.bits(whole))
    assert by_hand.accuracy(module.network) > 0.6


@item("UpdateOptimizer, accumulate_grad_batches=3", "same bits as by hand")
def optimizer_accumulation(folder):
    module = fitted(folder, DistributedOptimizers(), optimizer=by_hand.updating, accumulate_grad_batches=3)
    assert by_hand.same_as_ahead(module, epochs=2, accumulate=3)


@item('UpdateOptimizer, precision="16-mixed"', "same bits as by hand with a GradScaler, inside ahead()")
def optimizer_fp16(folder):
    plugins = [MixedPrecision("16-mixed", "cpu", scaler())]
    module = fitted(folder, DistributedOptimizers(), optimizer=skipping, plugins=plugins)
    other = scaler()
    assert by_hand.same_as_ahead(module, epochs=2, scaler=other)
    assert plugins[0].scaler.get_scale() == other.get_scale() != 2.0**16


class Normed(Digits):
    def __init__(self):
        super().__init__(by_hand.updating)
        self.network = nn.Sequential(nn.BatchNorm1d(64), self.network)


@item("UpdateOptimizer, StochasticWeightAveraging with BatchNorm", "ranks agree; its pass without backward is taken")
def optimizer_averaging(folder):
    module, averaging = Normed(), StochasticWeightAveraging(swa_lrs=0.001, swa_epoch_start=1)
    trainer(folder, DistributedOptimizers(), averaging, epochs=3).fit(module, by_hand.loader())
    by_hand.all_alike(module)


class Stops(Callback):
    """As Lightning's Timer does."""

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 3 and trainer.fit_loop.batch_idx % 2 == 0


@item("UpdateOptimizer, stopped while gradients accumulate", "ranks agree, in all parts of the module")
def optimizer_stopped(folder):
    module = Digits(by_hand.updating)
    trainer(folder, Stops(), DistributedOptimizers(), accumulate_grad_batches=2).fit(module, by_hand.loader())
    assert not module.optimizers().is_ahead
    by_hand.all_alike(module.network)


class ByHand(Digits):
    """Manual optimization."""

    def __init__(self):
        super().__init__(by_hand.updating)
        self.automatic_optimization = False

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        self.manual_backward(by_hand.loss_of(self.network, batch))
        optimizer.step()
        optimizer.zero_grad()


@item("UpdateOptimizer, manual optimization", "same bits as by hand")
def optimizer_manual(folder):
    module = ByHand()
    trainer(folder, DistributedOptimizers(), epochs=2).fit(module, by_hand.loader())
    assert by_hand.same_as_ahead(module, epochs=2)


@item("resume from a checkpoint made without the callback", "an error on all ranks but 0, which says what to do")
def of_rank_0_only(folder):
    file = folder / "half.ckpt"
    fitted(folder, optimizer=by_hand.updating, epochs=1, save=file)
    state = torch.load(file, weights_only=True)["optimizer_states"][0]
    resumed = by_hand.updating(Digits())
    said = r"rank 0 alone writes, save what gathered_state_dict\(\)"
    with pytest.raises(ValueError, match=said) if dist.get_rank() else nullcontext():
        resumed.load_state_dict(state)


@item("both, or a strategy without DDP", "an error before the first step")
def unfit(folder):
    with pytest.raises(TypeError, match="exchanges by itself: take DistributedOptimizers"):
        fitted(folder, SparseGradients(**SETTINGS), optimizer=by_hand.updating)
    with pytest.raises(TypeError, match="expected DistributedOptimizer or UpdateOptimizer for each"):
        fitted(folder, DistributedOptimizers())
