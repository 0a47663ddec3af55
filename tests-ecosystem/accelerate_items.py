"""Accelerate at two ranks on CPUs."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from by_hand import (
    RATE,
    SETTINGS,
    accuracy,
    all_alike,
    bits,
    loader,
    loss_of,
    network,
    same,
    trained_by_hand,
)
from items import collector
from sparse_collectives import DistributedOptimizer, SparseHookState, sparse_hook
from sparse_collectives.integrations.accelerate import distributed_optimizer, sparse_gradients

ITEMS = []
item = collector("Accelerate", ITEMS)


def accelerator_of(**options):
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **options)


def trained(accelerator, model, optimizer, *, epochs=2, clip=None):
    for _ in range(epochs):
        for batch in loader():
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = loss_of(model, batch)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    model = accelerator.unwrap_model(model)
    all_alike(model)
    return bits(model)


def prepared(accelerator, settings=SETTINGS):
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    sparse_gradients(accelerator, model, **settings)
    return model, optimizer


@item("the hook", "same bits as plain DDP with the hook")
def hook(folder):
    accelerator = accelerator_of()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    sparse_gradients(accelerator, model, **SETTINGS)  # ours
    assert same(trained(accelerator, model, optimizer), trained_by_hand())


@item("a hook given to DistributedDataParallelKwargs", "ignored by Accelerate; a warning says so")
def ignored(folder):
    state = SparseHookState(**SETTINGS)
    handler = DistributedDataParallelKwargs(comm_hook=sparse_hook)
    accelerator = accelerator_of(kwargs_handlers=[handler])
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with pytest.warns(UserWarning, match="has brought no gradient to this SparseHookState: the hook is not registered"):
        trained(accelerator, model, optimizer)
    assert state.comm.size == 2  # it has been there all the time


@item("accelerator.accumulate, three backwards a step", "same bits as plain DDP with no_sync()")
def accumulation(folder):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    assert same(trained(accelerator, *prepared(accelerator)), trained_by_hand(accumulate=3))


@item('mixed_precision="bf16"', "same bits as plain DDP under autocast")
def bf16(folder):
    accelerator = accelerator_of(mixed_precision="bf16")
    assert same(trained(accelerator, *prepared(accelerator)), trained_by_hand(autocast=torch.bfloat16))


@item("accelerator.clip_grad_norm_", "after the exchange: a warning, which names clip_norm=")
def clipping(folder):
    accelerator = accelerator_of()
    with pytest.warns(UserWarning, match="scaled down between the exchange and step"):
        trained(accelerator, *prepared(accelerator), clip=0.1)


@item("clipping before the exchange", "same bits as plain DDP with clip_norm, and no warning")
def clip_norm(folder):
    accelerator = accelerator_of()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exchange")
        sparse_gradients(accelerator, model, **SETTINGS, clip_norm=0.5)  # ours
        found = trained(accelerator, model, optimizer)
    assert same(found, trained_by_hand(settings={**SETTINGS, "clip_norm": 0.5}))


@item("save_state and load_state", "same bits as without a stop")
def resume(folder):
    accelerator = accelerator_of()
    trained(accelerator, *prepared(accelerator, SETTINGS), epochs=1)
    accelerator.save_state(folder)
    accelerator = accelerator_of()
    model, optimizer = prepared(accelerator, SETTINGS)
    accelerator.load_state(folder)
    assert same(trained(accelerator, model, optimizer, epochs=1), trained_by_hand(settings=SETTINGS))


@item("DistributedOptimizer, with Adam", "no DDP; save_state and load_state, the same bits as without a stop")
def optimizer(folder):
    def with_adam(accelerator):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        model = accelerator.prepare_model(model, evaluation_mode=True)  # ours
        named = model.named_parameters()
        optimizer = distributed_optimizer(accelerator, optimizer, named, sends="updates")  # ours
        return model, optimizer

    accelerator = accelerator_of()
    whole = trained(accelerator, *with_adam(accelerator), epochs=4)
    accelerator = accelerator_of()
    trained(accelerator, *with_adam(accelerator), epochs=2)
    accelerator.save_state(folder)
    accelerator = accelerator_of()
    model, optimizer = with_adam(accelerator)
    accelerator.load_state(folder)
    assert same(trained(accelerator, model, optimizer, epochs=2), whole)
    assert accuracy(model) > 0.5


@item("both, or a model without DDP", "an error before the first step")
def unfit(folder):
    accelerator = accelerator_of()
    model = network()
    with pytest.raises(TypeError, match="expected DistributedDataParallel around it: give what"):
        sparse_gradients(accelerator, model, **SETTINGS)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    exchanging = DistributedOptimizer(inner, model.named_parameters(), **SETTINGS)
    model, _ = accelerator.prepare(model, exchanging)
    with pytest.raises(TypeError, match="exchanges gradients itself"):
        sparse_gradients(accelerator, model, **SETTINGS)
    dist.barrier()
