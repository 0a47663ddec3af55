"""Accelerate at two ranks on CPUs."""

from __future__ import annotations

import warnings

import by_hand
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from by_hand import RATE, SETTINGS, UPDATES
from data_parallel import DistributedOptimizer, SparseHookState, sparse_hook
from data_parallel.integrations.accelerate import sparse_gradients, update_optimizer
from items import collector

ITEMS = []
item = collector("Accelerate", ITEMS)


def accelerator_of(**options):
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **options)


def trained(accelerator, model, optimizer, *, epochs=2, clip=None, autocast=None):
    for _ in range(epochs):
        for batch in by_hand.loader():
            with accelerator.accumulate(model):
                with torch.autocast("cpu", autocast) if autocast else accelerator.autocast():
                    loss = by_hand.loss_of(model, batch)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    model = accelerator.unwrap_model(model)
    by_hand.all_alike(model)
    return model


def prepared(accelerator, settings=SETTINGS):
    model = by_hand.network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    sparse_gradients(accelerator, model, **settings)
    return model, optimizer


@item("the hook", "same bits as plain DDP with the hook")
def hook(folder):
    accelerator = accelerator_of()
    model = by_hand.network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    sparse_gradients(accelerator, model, **SETTINGS)  # ours
    assert by_hand.same_as_hook(trained(accelerator, model, optimizer))


@item("a hook given to DistributedDataParallelKwargs", "ignored by Accelerate; a state with `named_parameters` warns")
def ignored(folder):
    model = by_hand.network()
    state = SparseHookState(named_parameters=model.named_parameters(), **SETTINGS)
    handler = DistributedDataParallelKwargs(comm_hook=sparse_hook)
    accelerator = accelerator_of(kwargs_handlers=[handler])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with pytest.warns(UserWarning, match="has brought no gradient to this SparseHookState: the hook is not registered"):
        trained(accelerator, model, optimizer)
    assert state.comm.size == 2  # it has been there all the time


@item("accelerator.accumulate, three backwards a step", "same bits as plain DDP with no_sync()")
def accumulation(folder):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    assert by_hand.same_as_hook(trained(accelerator, *prepared(accelerator)), accumulate=3)


@item('mixed_precision="bf16"', "same bits as plain DDP under autocast")
def bf16(folder):
    accelerator = accelerator_of(mixed_precision="bf16")
    assert by_hand.same_as_hook(trained(accelerator, *prepared(accelerator)), autocast=torch.bfloat16)


@item('mixed_precision="fp16", on a CPU', "ignored by Accelerate, which makes no GradScaler: the same bits in FP32")
def fp16(folder):
    accelerator = accelerator_of(mixed_precision="fp16")
    assert accelerator.scaler is None
    assert by_hand.same_as_hook(trained(accelerator, *prepared(accelerator)))


def scaling():
    """An accelerator with the GradScaler that it makes on CUDA only, and another one for the loop by hand."""
    accelerator, *scalers = accelerator_of(), *(torch.amp.GradScaler("cpu", growth_interval=5) for _ in range(2))
    accelerator.scaler = scalers[0]
    return accelerator, scalers[1]


@item("a GradScaler, put into accelerator.scaler", "same bits as plain DDP with one, steps that it skips included")
def scaler(folder):
    accelerator, other = scaling()
    found = trained(accelerator, *prepared(accelerator), autocast=torch.float16)
    assert by_hand.same_as_hook(found, autocast=torch.float16, scaler=other)
    assert accelerator.scaler.get_scale() == other.get_scale() != 2.0**16


@item("accelerator.clip_grad_norm_", "after the exchange: a warning, which names clip_norm=")
def clipping(folder):
    accelerator = accelerator_of()
    with pytest.warns(UserWarning, match="scaled down between the exchange and step"):
        trained(accelerator, *prepared(accelerator), clip=0.1)


@item("clipping before the exchange", "same bits as plain DDP with clip_norm, and no warning")
def clip_norm(folder):
    accelerator = accelerator_of()
    model = by_hand.network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exchange")
        sparse_gradients(accelerator, model, **SETTINGS, clip_norm=0.5)  # ours
        found = trained(accelerator, model, optimizer)
    assert by_hand.same_as_hook(found, settings={**SETTINGS, "clip_norm": 0.5})


@item("save_state and load_state", "same bits as without a stop")
def resume(folder):
    accelerator = accelerator_of()
    trained(accelerator, *prepared(accelerator, SETTINGS), epochs=1)
    accelerator.save_state(folder)
    accelerator = accelerator_of()
    model, optimizer = prepared(accelerator, SETTINGS)
    accelerator.load_state(folder)
    assert by_hand.same_as_hook(trained(accelerator, model, optimizer, epochs=1), settings=SETTINGS)


def with_adam(accelerator):
    model = by_hand.network()
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    return model, update_optimizer(accelerator, adam, model, **UPDATES)


@item("UpdateOptimizer, with Adam", "no DDP; same bits as a loop by hand with ahead()")
def optimizer(folder):
    accelerator = accelerator_of()
    model = by_hand.network()
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    model = accelerator.prepare_model(model, evaluation_mode=True)  # ours
    optimizer = update_optimizer(accelerator, adam, model, **UPDATES)  # ours
    trained(accelerator, model, optimizer, epochs=4)
    assert by_hand.same_as_ahead(model)
    assert by_hand.accuracy(model) > 0.5


@item("UpdateOptimizer, save_state and load_state", "same bits as without a stop")
def optimizer_resume(folder):
    accelerator = accelerator_of()
    trained(accelerator, *with_adam(accelerator), epochs=2)
    accelerator.save_state(folder)
    accelerator = accelerator_of()
    model, optimizer = with_adam(accelerator)
    accelerator.load_state(folder)
    assert by_hand.same_as_ahead(trained(accelerator, model, optimizer, epochs=2))


@item("UpdateOptimizer, accelerator.accumulate", "same bits as by hand")
def optimizer_accumulation(folder):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    found = trained(accelerator, *with_adam(accelerator), epochs=2)
    assert by_hand.same_as_ahead(found, epochs=2, accumulate=3)


@item("UpdateOptimizer, a GradScaler in accelerator.scaler", "same bits as by hand, skipped steps included")
def optimizer_scaler(folder):
    accelerator, other = scaling()
    found = trained(accelerator, *with_adam(accelerator), epochs=2, autocast=torch.float16)
    assert by_hand.same_as_ahead(found, epochs=2, scaler=other)
    assert accelerator.scaler.get_scale() == other.get_scale() != 2.0**16


@item("both, or a model without DDP", "an error before the first step")
def unfit(folder):
    accelerator = accelerator_of()
    model = by_hand.network()
    with pytest.raises(TypeError, match="expected DistributedDataParallel around it: give what"):
        sparse_gradients(accelerator, model, **SETTINGS)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    exchanging = DistributedOptimizer(inner, model.named_parameters(), **SETTINGS)
    model, _ = accelerator.prepare(model, exchanging)
    with pytest.raises(TypeError, match="exchanges by itself"):
        sparse_gradients(accelerator, model, **SETTINGS)
    dist.barrier()
