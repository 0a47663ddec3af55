"""The wrapped optimizer's part of a checkpoint, such that torch.distributed.checkpoint leaves nothing of it out."""

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from replicas.loading import check_like, is_number

_HELPERS = "torch.distributed.checkpoint.state_dict"
_NEW = "new"
SCHEDULED = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names"}
"""Settings that schedulers, and named parameters, add to groups."""


def saved_optimizer(optimizer: Optimizer, *, stepped: bool) -> tuple[dict[str, Any], str | list[str]]:
    """The optimizer's state_dict, and a list of what it holds by parameter, for `check_loaded`.

    torch.distributed.checkpoint loads only what it finds, and a new optimizer has no state yet. So a new one gives the
    state that it will have after a step, to be loaded into, marked so that it is left out where it was not. A file must
    have all that a new one gives: parameters that have had no gradient yet get such state too, which is not listed.

    Args:
        optimizer: Optimizer to be saved.
        stepped: Whether it has taken a step, after which one without state keeps none.
    """
    state = optimizer.state_dict()
    kept, numbers = state["state"], _in_groups(state["param_groups"])
    numbered = zip(numbers, _in_groups(optimizer.param_groups), strict=True)
    late = [p for number, p in numbered if p.requires_grad and not kept.get(number)]
    if not late or (stepped and not kept):
        return state, _held(state)
    own = {number: of for number, of in kept.items() if of}
    return {**state, "state": {**foreseen_state(optimizer, of=late), **own}}, _held(state) if kept else _NEW


def check_loaded(state: Mapping[str, Any], held: Any) -> dict[str, Any]:
    """State for the optimizer to load, of what `saved_optimizer` gave, by torch.distributed.checkpoint or not.

    A file of torch.distributed.checkpoint has text for numbers, and no empty parts. What `held` does not name was not
    the optimizer's, and is left out.

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
    if held is None:
        return state
    if lost := sorted(set(held) - set(_held(state))):
        raise ValueError(
            f"of the wrapped optimizer's state the checkpoint holds {lost}, which was not loaded: "
            "torch.distributed.checkpoint loads only what the state given to it holds; take a step before, or load "
            "the whole file by torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    names = set(held)
    own = {p: {name: v for name, v in kept.items() if f"{p}.{name}" in names} for p, kept in state["state"].items()}
    return {**state, "state": {p: kept for p, kept in own.items() if kept}}


def load_into(held: Any, state: Mapping[str, Any]) -> None:
    """Loads a state into an optimizer or a scheduler, and checks what torch would only find at the next step, or never.

    For `wholly`, which puts the old state back.

    Args:
        held: Optimizer or scheduler.
        state: Its state_dict.

    Raises:
        ValueError: Numbers among the settings are something else, or state by parameter is missing or of another kind:
            in torch's own optimizers also settings that are missing, and tensors of other shapes.
    """
    if isinstance(held, Optimizer):
        _load_optimizer(held, state)
        return
    check_like(state, {}, "the scheduler's state")
    _check_numbers(state, held.state_dict(), "the scheduler's state")
    held.load_state_dict(dict(state))


def _check_numbers(given: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where a setting that is a number or a flag, or a tuple of them, is none, nor None."""
    for key, like in own.items():
        told, settings = given.get(key), like if isinstance(like, tuple) else (like,)
        each = told if isinstance(told, tuple | list) and isinstance(like, tuple) else (told,)
        alike = told is None or (len(each) == len(settings) and all(one is None or _is_setting(one) for one in each))
        if all(map(_is_setting, settings)) and not alike:
            raise ValueError(f"{where}, {key} is {told!r:.100}, expected what {like!r} is: it was damaged")


def _is_setting(held: Any) -> bool:
    """Whether it is one number, maybe as a tensor, or a flag."""
    return held.numel() == 1 if isinstance(held, Tensor) else isinstance(held, bool) or is_number(held)


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    check_like(state, {"state": {}, "param_groups": [{"params": []}]}, "the wrapped optimizer's state")
    saved = _in_groups(state["param_groups"])
    if len(set(saved)) < len(saved) or not all(isinstance(state["state"].get(number, {}), dict) for number in saved):
        raise ValueError(f"the wrapped optimizer's state is not by parameter, of which it has {saved!r:.200}")
    before = optimizer.param_groups
    try:
        optimizer.load_state_dict(copy.deepcopy(dict(state)))  # torch would go on in the given tensors
    except KeyError as error:
        raise ValueError(
            f"a {type(optimizer).__name__} does not find {error} in the state: it was damaged, or belongs into the "
            "kind of optimizer that saved it"
        ) from error
    for given, group, own in zip(state["param_groups"], optimizer.param_groups, before, strict=True):
        settings, others = {key: own[key] for key in optimizer.defaults if key in own}, given.keys() - own - SCHEDULED
        lacking = settings.keys() - (given if others else group)  # torch fills in those of other kinds, too
        if lacking and (others or _is_torchs(optimizer)):
            raise ValueError(
                f"a group of the state lacks {sorted(lacking)}, which a {type(optimizer).__name__} has, and has "
                f"{sorted(others) or 'no others'}: it was damaged, or belongs into the kind of optimizer that saved it"
            )
        _check_numbers(group, settings, "a group of the wrapped optimizer")
    foreseen = _shapes_after_a_step(optimizer)
    for number, p in zip(saved, _in_groups(before), strict=True):
        if kept := state["state"].get(number):
            _check_kept(kept, foreseen.get(p, {}), f"the wrapped optimizer's state of parameter {number}")
            _uncast(optimizer.state.get(p, {}), kept, p)


def _uncast(loaded: dict[str, Any], kept: Mapping[str, Any], p: Tensor) -> None:
    """Restores numbers, such as NAdam's product of momenta, that torch has cast to the dtype of their parameter."""
    for name, held in kept.items():
        scalar = isinstance(held, Tensor) and held.dim() == 0 < p.dim()
        if scalar and isinstance(loaded.get(name), Tensor) and name != "step":
            loaded[name] = held.to(loaded[name].device, copy=True)


def _check_kept(kept: Mapping[str, Any], foreseen: Mapping[str, Tensor], where: str) -> None:
    """Raises ValueError for state of one parameter that is not as foreseen, or holds no usable tensors."""
    tensors = {name: held for name, held in kept.items() if isinstance(held, Tensor)} | dict(foreseen)
    steps = {name for name, like in tensors.items() if not like.dim() and is_number(kept.get(name))}  # of older states
    check_like(kept, {name: like for name, like in tensors.items() if name not in steps}, where)


def _shapes_after_a_step(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """State by parameter after a step, as tensors without memory; {} but for torch's own optimizers."""
    if not _is_torchs(optimizer):
        return {}
    scratch, twins = copy.copy(optimizer), dict[Tensor, Tensor]()
    scratch.state, scratch.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        plain: dict[str, Any] = {key: False for key in ("foreach", "fused", "capturable") if key in group}
        kinds = dict[Any, Tensor]()  # one for all parameters of a kind: a step takes as long as there are parameters
        for p in group["params"]:
            twins[p] = kinds.setdefault((p.shape, p.stride(), p.dtype, p.requires_grad), _twin(p))
        scratch.param_groups.append({**group, **plain, "params": list(kinds.values())})
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(scratch)  # without hooks
    except Exception:  # one that needs a closure, or looks at values
        return {}
    of = {p: scratch.state[twin] for p, twin in twins.items()}
    return {p: {name: held for name, held in kept.items() if isinstance(held, Tensor)} for p, kept in of.items()}


def _twin(p: Tensor) -> Tensor:
    """Parameter of the same shape, with a gradient where it has one, without memory."""
    twin = torch.empty_like(p, device="meta").requires_grad_(p.requires_grad)
    twin.grad = torch.zeros_like(twin) if p.requires_grad else None
    return twin


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def foreseen_state(optimizer: Optimizer, *, of: Iterable[Tensor] | None = None) -> dict[Any, Any]:
    """Part "state" of the state_dict after a step, taken by a copy; {} where a step takes more than gradients.

    Args:
        optimizer: Optimizer, which stays as it is.
        of: Parameters whose state is asked for: no others are copied. Default: all.
    """
    parameters = _in_groups(optimizer.param_groups)
    asked = {id(p) for p in (parameters if of is None else of)}
    others = [p for p in parameters if id(p) not in asked]
    stand_ins: dict[int, Any] = {id(optimizer.state[p]): {} for p in others if p in optimizer.state}
    try:
        stand_ins |= {id(p): nn.Parameter(p.new_empty([0] * p.dim()), requires_grad=False) for p in others}
        scratch = copy.deepcopy(optimizer, stand_ins)
        for p in _in_groups(scratch.param_groups):
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        scratch.step()
    except Exception:  # one that needs a closure, or cannot be copied: what is not loaded is an error then
        return {}
    return {p: kept for p, kept in scratch.state_dict()["state"].items() if kept}


def _in_groups(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Parameters, or their numbers in a state, in the order of the groups."""
    return [p for group in groups for p in group["params"]]


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
