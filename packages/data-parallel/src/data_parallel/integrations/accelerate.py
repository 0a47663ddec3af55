"""Accelerate: a call after accelerator.prepare, with save_state and load_state that hold every rank's state."""

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from data_parallel.ddp.hook import SparseHookState
from data_parallel.integrations.attaching import hooked
from data_parallel.optimizer import DistributedOptimizer, ExchangingOptimizer
from data_parallel.update_optimizer import UpdateOptimizer

logger = logging.getLogger(__name__)

HOW = "give what accelerator.prepare(model) returned, with the distributed type MULTI_GPU or MULTI_CPU"


def sparse_gradients(accelerator: Accelerator, model: Any, **settings: Any) -> SparseHookState | None:
    """Gradients of a prepared model are exchanged by `sparse_hook`.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        sparse_gradients(accelerator, model, density=0.01, momentum=0.9)

    settings: of `SparseHookState`; its group, names and scaler are found. accelerator.clip_grad_norm_ would come after
        the exchange: give clip_norm here in its place.

    accelerator.save_state and load_state then hold the states of all ranks. Call it before load_state.
    Returns the state; with a single process nothing is exchanged, and it is None.
    Raises TypeError for a model that is not in DDP.
    """
    if accelerator.num_processes == 1:
        logger.info("one process: nothing is exchanged")
        return None
    state = hooked(model, accelerator._optimizers, settings, grad_scaler=accelerator.scaler, how=HOW)
    # every rank is asked for it, and rank 0's answer is written
    of_all = SimpleNamespace(state_dict=state.gathered_state_dict, load_state_dict=state.load_state_dict)
    accelerator.register_for_checkpointing(of_all)
    return state


def distributed_optimizer(
    accelerator: Accelerator, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]], **settings: Any
) -> Any:
    """The optimizer in a `DistributedOptimizer`, prepared; the model is prepared without DDP.

        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = distributed_optimizer(accelerator, sgd, model.named_parameters(), momentum=0.9)

    settings: of `DistributedOptimizer`. accelerator.clip_grad_norm_ holds each rank's own gradient. With fp16 a step
    that the scaler skips is skipped on every rank. accelerator.save_state and load_state hold the states of all ranks.
    """
    return _prepared(accelerator, DistributedOptimizer, optimizer, named_parameters, settings)


def update_optimizer(accelerator: Accelerator, optimizer: Optimizer, model: nn.Module, **settings: Any) -> Any:
    """The optimizer in `UpdateOptimizer.for_model`, prepared as by `distributed_optimizer`; the loop stays as it is.

        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = update_optimizer(accelerator, adam, model, steps=10_000)

    settings: of `UpdateOptimizer.for_model`; steps are the optimizer's, not those of gradients that accumulate.
    """
    prepared = _prepared(accelerator, UpdateOptimizer.for_model, optimizer, model, settings)
    prepared.ahead = prepared.optimizer.ahead
    return prepared


def _prepared(
    accelerator: Accelerator, made: Callable[..., ExchangingOptimizer], optimizer: Any, over: Any, settings: Any
) -> Any:
    if accelerator.scaler is not None:
        settings = {"nonfinite": "skip", **settings}
    exchanging = made(optimizer, over, **settings)
    # device_placement would save and load its state now
    prepared = accelerator.prepare_optimizer(exchanging, device_placement=False)
    prepared.state_dict = exchanging.gathered_state_dict  # every rank is asked, and rank 0's answer is written
    return prepared
