"""A checkpoint's state must be one that this replica could have written after so many steps.

Checksums find damage; this finds files that were exchanged, cut down or made by somebody else, which a load would
take in part, or which would stop training later.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from trainer.command_line.options import Options
from trainer.errors import DamagedError
from trainer.resuming.likeness import require_equal, require_like
from trainer.training.replica import Replica
from trainer.training.synchronisation import SPARSE

State = dict[str, Any]


def fitted(state: State, replica: Replica, options: Options, *, step: int, steps_per_epoch: int) -> State:
    """`state`, completed by what another version of torch did not write; DamagedError that names what does not fit.

    replica: one that has taken no step; nothing of it is changed.
    """
    fresh = replica.state_dict()
    if isinstance(state.get("cuda_rng"), Tensor):  # whether there is a GPU may have changed
        fresh["cuda_rng"] = state["cuda_rng"]
    state = _completed(state, fresh)
    fresh["optimizer"] |= _expected_tensors(replica, options, step, skipped=_skipped(state))
    require_like(state, fresh, "the state")
    if divmod(step, steps_per_epoch) != (state["position"]["epoch"], state["position"]["step"]):
        raise DamagedError(f"position {state['position']} is not that of step {step}")
    if state["position"]["epoch"] > options.max_epochs:
        raise DamagedError(f"it has more epochs than --max-epochs {options.max_epochs} asks for")
    require_equal(state["schedule"]["last_epoch"], step, "the schedule's step")
    require_equal(state["schedule"]["base_lrs"], fresh["schedule"]["base_lrs"], "the schedule's rates")
    _require_settings(state["optimizer"], fresh["optimizer"], step)
    return state


def _completed(state: State, fresh: State) -> State:
    """With the schedule's and the optimizer's settings that this version of torch knows, and no others."""
    optimizer, schedule = state.get("optimizer"), state.get("schedule")
    if isinstance(schedule, dict):
        needed = {"last_epoch", "base_lrs", "_last_lr", "_step_count"}
        state = state | {"schedule": _known(schedule, fresh["schedule"], needed)}
    if isinstance(optimizer, dict) and isinstance(groups := optimizer.get("param_groups"), list):
        for number, (group, own) in enumerate(zip(groups, fresh["optimizer"]["param_groups"], strict=False)):
            if isinstance(group, dict):
                groups = [*groups[:number], _known(group, own, {"lr", "params"}), *groups[number + 1 :]]
        state = state | {"optimizer": optimizer | {"param_groups": groups}}
    return state


def _known(found: State, fresh: State, needed: Set[str]) -> State:
    if not needed <= found.keys():
        return found
    return {name: found.get(name, value) for name, value in fresh.items()}


def _skipped(state: State) -> object:
    """Steps that were not taken, as the file says; what is not there is found missing later."""
    optimizer = state.get("optimizer")
    own = optimizer.get("distributed") if isinstance(optimizer, dict) else None
    return own.get("skipped") if isinstance(own, dict) else None


def _expected_tensors(replica: Replica, options: Options, step: int, *, skipped: object) -> State:
    """What comes into being with the first step: SGD's momenta (not if it was skipped), residuals, velocities."""
    own = replica.optimizer.state_dict()["distributed"]
    trained = [p for group in replica.optimizer.param_groups for p in group["params"]]
    named = replica.model.named_parameters()
    wide = {name: _wide(p) for name, p in named if _is_trained(p)} if step and options.algorithm in SPARSE else {}
    stepped = options.momentum > 0 and options.algorithm not in SPARSE and step != skipped
    return {
        "state": {i: {"momentum_buffer": p} for i, p in enumerate(trained) if stepped and _is_trained(p)},
        # What SGD holds by parameter, as a list, or that it has taken no step; its keys were looked at above.
        "distributed": own | {"residuals": wide, "velocities": wide if options.momentum else {}, "wrapped": None},
    }


def _require_settings(found: State, fresh: State, step: int) -> None:
    for name in ("rank", "world_size", "algorithm"):
        require_equal(found["distributed"][name], fresh["distributed"][name], f"the optimizer's {name}")
    if found["distributed"]["skipped"] > step:
        raise DamagedError(f"{found['distributed']['skipped']} of {step} steps were skipped")
    for group, own in zip(found["param_groups"], fresh["param_groups"], strict=True):
        for name in own.keys() - {"lr"}:
            require_equal(group[name], own[name], f"the optimizer's {name}")


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _wide(parameter: Tensor) -> Tensor:
    """Of the shape and dtype of its residual, without memory."""
    return torch.empty(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device="meta")
