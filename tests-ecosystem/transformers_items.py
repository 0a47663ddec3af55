"""transformers' Trainer at two ranks on CPUs."""

from __future__ import annotations

import shutil
import warnings

import by_hand
import pytest
import torch
import torch.distributed as dist
from by_hand import RATE, SETTINGS, UPDATES
from data_parallel import DistributedOptimizer, UpdateOptimizer
from data_parallel.integrations.transformers import DistributedOptimizers, SparseGradients
from items import collector
from torch import nn
from transformers import Trainer, TrainingArguments

ITEMS = []
item = collector("transformers", ITEMS)


class Digits(nn.Module):
    """Gives its own loss, as Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.network = by_hand.network()

    def forward(self, images, labels):
        loss = by_hand.loss_of(self.network, (images, labels))
        return {"loss": loss}


class EveryRankItsOwn(Trainer):
    """Loads as the loop by hand does."""

    def get_train_dataloader(self):
        return [{"images": images, "labels": labels} for images, labels in by_hand.loader()]

    def _get_train_sampler(self, *given):
        return None


def arguments(folder, *, epochs=2, clip=0.0, **options):
    options = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "report_to": "none", **options}
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=epochs,
        max_grad_norm=clip,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,  # else DDP keeps its first buckets, and gtopk cuts otherwise than by hand
        **options,
    )


def trainer_of(folder, optimizer=None, **options):
    given, model = arguments(folder, **options), Digits()
    made = torch.optim.SGD(model.parameters(), lr=RATE) if optimizer is None else optimizer(model)
    return EveryRankItsOwn(model, given, optimizers=(made, None))


def trained(folder, settings=SETTINGS, *, resume=None, **options):
    trainer = trainer_of(folder, **options)
    trainer.add_callback(SparseGradients(trainer, **settings))  # ours
    trainer.train(resume_from_checkpoint=resume)
    by_hand.all_alike(trainer.model)
    return trainer.model


@item("the hook", "same bits as plain DDP with the hook")
def hook(folder):
    trainer = trainer_of(folder)
    trainer.add_callback(SparseGradients(trainer, **SETTINGS))  # ours
    trainer.train()
    assert by_hand.same_as_hook(trainer.model)


@item("gradient_accumulation_steps=3", "same bits as plain DDP with no_sync()")
def accumulation(folder):
    assert by_hand.same_as_hook(trained(folder, gradient_accumulation_steps=3), accumulate=3)


@item("bf16=True", "same bits as plain DDP under autocast")
def bf16(folder):
    assert by_hand.same_as_hook(trained(folder, bf16=True), autocast=torch.bfloat16)


@item("fp16=True, on a CPU", "ignored by Accelerate, which makes no GradScaler: the same bits in FP32")
def fp16(folder):
    assert by_hand.same_as_hook(trained(folder, fp16=True))


@item("max_grad_norm, by default 1.0", "after the exchange: a warning, which names clip_norm=")
def clipping(folder):
    with pytest.warns(UserWarning, match="scaled down between the exchange and step"):
        trained(folder, clip=0.1)


@item("clipping before the exchange", "same bits as plain DDP with clip_norm, and no warning")
def clip_norm(folder):
    trainer = trainer_of(folder)
    trainer.add_callback(SparseGradients(trainer, **SETTINGS, clip_norm=0.5))  # ours
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exchange")
        trainer.train()
    assert by_hand.same_as_hook(trainer.model, settings={**SETTINGS, "clip_norm": 0.5})


@item("train(resume_from_checkpoint=…)", "same bits as without a stop")
def resume(folder):
    trained(folder, SETTINGS, epochs=1, save_strategy="epoch")
    model = trained(folder, SETTINGS, resume=True)
    assert by_hand.same_as_hook(model, settings=SETTINGS)


@item("a checkpoint of another folder", "resume_from= names it; what does not belong to the weights is an error")
def elsewhere(folder):
    trained(folder, SETTINGS, epochs=1, save_strategy="epoch")
    moved = folder / "moved"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.move(folder / "checkpoint-12", moved)
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="give resume_from="):
        trained(folder, SETTINGS, resume=str(moved))
    trained(folder, {**SETTINGS, "momentum": 0.5}, epochs=1, save_strategy="epoch")  # the same step, other weights
    with pytest.raises(ValueError, match="saved with other weights: give resume_from="):
        trained(folder, SETTINGS, resume=str(moved))
    model = trained(folder, {**SETTINGS, "resume_from": moved}, resume=str(moved))
    assert by_hand.same_as_hook(model, settings=SETTINGS)


def updated(folder, *, resume=None, **options):
    trainer = trainer_of(folder, by_hand.updating, **options)
    trainer.add_callback(DistributedOptimizers(trainer))
    trainer.train(resume_from_checkpoint=resume)
    by_hand.all_alike(trainer.model)
    return trainer.model


@item("UpdateOptimizer, with Adam", by_hand.AHEAD)
def optimizer(folder):
    def adam(model):
        inner = torch.optim.Adam(model.parameters(), lr=0.003)
        return UpdateOptimizer.for_model(inner, model, **UPDATES)  # ours

    trainer = trainer_of(folder, adam, epochs=4)
    trainer.add_callback(DistributedOptimizers(trainer))  # ours
    trainer.train()
    assert by_hand.same_as_ahead(trainer.model)
    updated(folder, epochs=2, save_strategy="epoch")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training goes on")
        model = updated(folder, epochs=4, resume=True)
    assert by_hand.same_as_ahead(model)
    assert by_hand.accuracy(model.network) > 0.5


@item("UpdateOptimizer, save_only_model=True", "training goes on without residuals, and a warning says so")
def optimizer_not_saved(folder):
    updated(folder, epochs=2, save_strategy="epoch", save_only_model=True)
    with pytest.warns(match="after step 24, but the checkpoint has no state of the optimizer"):
        updated(folder, epochs=4, resume=True)


@item("UpdateOptimizer, gradient_accumulation_steps=3", "same bits as by hand")
def optimizer_accumulation(folder):
    model = updated(folder, gradient_accumulation_steps=3)
    assert by_hand.same_as_ahead(model, epochs=2, accumulate=3)


@item("both", "an error before the first step")
def unfit(folder):
    def exchanging(model):
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        return DistributedOptimizer(inner, model.named_parameters(), **SETTINGS)

    trainer = trainer_of(folder, exchanging)
    trainer.add_callback(SparseGradients(trainer, **SETTINGS))
    with pytest.raises(TypeError, match="exchanges by itself: take DistributedOptimizers"):
        trainer.train()
