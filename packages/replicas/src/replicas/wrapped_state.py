"""The wrapped optimizer's part of a checkpoint, such that torch.distributed.checkpoint leaves nothing of it out."""

import copy
import sys
from collections.abc import Mapping
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch.optim import Optimizer

_HELPERS = "torch.distributed.checkpoint.state_dict"
_NEW = "new"


def saved_optimizer(optimizer: Optimizer, *, stepped: bool) -> tuple[dict[str, Any], str | list[str]]:
    """The optimizer's state_dict, and a list of what it holds by parameter, for `check_loaded`.

    torch.distributed.checkpoint loads only what it finds, and a new optimizer has no state yet. So a new one gives the
    state that it will have after a step, to be loaded into, marked so that it is left out where it was not.

    Args:
        optimizer: Optimizer to be saved.
        stepped: Whether it has all the state that it will have.
    """
    state = optimizer.state_dict()
    if state["state"] or stepped:
        return state, _held(state)
    return {**state, "state": foreseen_state(optimizer)}, _NEW


def check_loaded(state: Mapping[str, Any], held: Any) -> dict[str, Any]:
    """State for the optimizer to load, of what `saved_optimizer` gave, by torch.distributed.checkpoint or not.

    A file of torch.distributed.checkpoint has text for numbers, and no empty parts.

    Args:
        state: The optimizer's state_dict.
        held: List of what it held when it was saved.

    Raises:
        ValueError: The checkpoint held more than was loaded of it.
    """
    by_parameter = state.get("state", {})
    state = {**state, "state": {int(p) if str(p).isdigit() else p: kept for p, kept in by_parameter.items()}}
    if held == _NEW:
        return {**state, "state": {}}
    if held is not None and (lost := sorted(set(held) - set(_held(state)))):
        raise ValueError(
            f"of the wrapped optimizer's state the checkpoint holds {lost}, which was not loaded: "
            "torch.distributed.checkpoint loads only what the state given to it holds; take a step before, or load "
            "the whole file by torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    return state


def foreseen_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Part "state" of the state_dict after a step, taken by a copy; {} where a step takes more than gradients.

    Args:
        optimizer: Optimizer, which stays as it is.
    """
    try:
        scratch = copy.deepcopy(optimizer)
        for group in scratch.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        scratch.step()
    except Exception:  # one that needs a closure, or cannot be copied: what is not loaded is an error then
        return {}
    return dict(scratch.state_dict()["state"])


def refuse_torch_helpers(what: str) -> None:
    """Raises RuntimeError in get_state_dict and its like, which would leave out what the wrapper `what` keeps."""
    for frame, _ in islice(walk_stack(sys._getframe(2)), 8):  # torch and learning-rate schedulers wrap step()
        if frame.f_globals.get("__name__") == _HELPERS:
            raise RuntimeError(
                f"{frame.f_code.co_name.lstrip('_')} of {_HELPERS} knows state and param_groups only, and would leave "
                f"out what a {what} keeps besides: give torch.distributed.checkpoint the "
                'optimizer itself under a key of each rank, dcp.save({f"optimizer {rank}": optimizer}) and dcp.load, '
                "and call get_state_dict for the model only"
            )


def _held(state: Mapping[str, Any]) -> list[str]:
    """Names of the state by parameter; as plain text, which is loaded as a whole."""
    return [f"{p}.{name}" for p, held in state["state"].items() for name in held]
