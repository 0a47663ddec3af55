"""Beginning of training: all ranks start from the same parameters and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from communicators import Communicator, run, schedules
from replicas import refuse_unlike
from replicas.averaging import copy_from_first
from replicas.first_broadcast import broadcast_parameters
from replicas.parameters import name_parameters
from torch import Tensor, nn
from torch.optim import Optimizer


def named_parameters(
    optimizer: Optimizer, model: nn.Module | None, *, needs_rate: bool, what: str
) -> dict[str, Tensor]:
    """Names the optimizer's parameters: as the model does, or the optimizer itself, or by number.

    Raises:
        TypeError: Parameters cannot be averaged.
        ValueError: Model and optimizer do not fit, or there is nothing to average.
    """
    pairs = _numbered(optimizer) if model is None else list(model.named_parameters())
    named = name_parameters(optimizer, pairs)
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in named.items() if id(p) in members}
    if sharded := [name for name, p in named.items() if _is_sharded(p)]:
        raise TypeError(
            f"parameters that are sharded (DTensor): {sharded}; to average them shard by shard is not supported: "
            f"give {what} whole parameters, as DistributedDataParallel or a plain module has them"
        )
    if not any(p.requires_grad and p.numel() for p in named.values()):
        raise ValueError("no parameter of the optimizer is trainable: there is nothing to average")
    if needs_rate and (lacking := [g for g, group in enumerate(optimizer.param_groups) if "lr" not in group]):
        raise ValueError(f"{what} counts in learning rates, but parameter groups {lacking} have no 'lr'")
    return named


def agree(
    named: Mapping[str, Tensor],
    model: nn.Module | None,
    comm: Communicator,
    what: str,
    settings: Mapping[str, Any],
    *,
    broadcast: bool,
) -> None:
    """Makes ranks agree on settings and parameters: copies rank 0's parameters or, without `broadcast`, compares them.

    Raises:
        CollectiveError: Ranks differ.
    """
    text = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    others = _others(model, named)
    if broadcast:
        broadcast_parameters(named, comm, what=what, settings=text)
        rest = [*others.values(), *(model.buffers() if model else [])]
        copy_from_first([tensor for tensor in rest if tensor.numel()], comm, facts=f"what is not averaged of {what}")
    else:
        run(schedules.barrier(comm.rank, comm.size), comm, facts=f"{what}({text}, broadcast=False)")
        refuse_unlike({**named, **others}, comm)


def _others(model: nn.Module | None, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of the model that the optimizer does not have, such as frozen ones in fine-tuning."""
    known = {id(p) for p in named.values()}
    return {} if model is None else {name: p for name, p in model.named_parameters() if id(p) not in known}


def _numbered(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    pairs: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"parameter {len(pairs) + i}" for i in range(len(group["params"]))]
        pairs += zip(names, group["params"], strict=True)
    return pairs


def _is_sharded(p: Tensor) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(p, DTensor)
