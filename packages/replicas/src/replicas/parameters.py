"""Named parameters of a distributed optimizer, and checks that none is left out, at first and later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer


def check_named_parameters(pairs: Sequence[tuple[str, Tensor]]) -> None:
    """Checks pairs as `model.named_parameters()` gives them.

        check_named_parameters(list(model.named_parameters()))

    Args:
        pairs: Names and parameters.

    Raises:
        TypeError: An entry is no pair of name and tensor, or a trainable parameter is not floating-point.
        ValueError: A name, or a parameter, is there twice.
    """
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                f"named_parameters holds {type(pair).__name__}, expected pairs of name and tensor: "
                "pass model.named_parameters(), not model.parameters()"
            )
    names = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if names:
        raise ValueError(f"duplicate names in named_parameters: {names}; names must be unique")
    counts = Counter(id(parameter) for _, parameter in pairs)
    twice = [name for name, parameter in pairs if counts[id(parameter)] > 1]
    if twice:
        raise ValueError(f"one parameter under several names: {twice}; name each once")
    wrong = [f"{name} ({p.dtype})" for name, p in pairs if p.requires_grad and not p.is_floating_point()]
    if wrong:
        raise TypeError(f"parameters of a dtype that cannot be averaged: {wrong}; expected floating-point ones")


def named_of(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[str, Tensor]:
    """All named parameters by name, checked against the optimizer's; None: its own, by its names or by number.

    Raises TypeError or ValueError as `check_named_parameters`, and ValueError for a parameter of the optimizer without
    a name and for a trainable one that the optimizer does not have.
    """
    pairs = _numbered(optimizer) if named_parameters is None else list(named_parameters)
    check_named_parameters(pairs)
    names = {id(parameter): name for name, parameter in pairs}
    members = {id(p): (g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    unnamed = [(g, tuple(p.shape)) for key, (g, p) in members.items() if key not in names]
    if unnamed:
        raise ValueError(
            f"parameters of the optimizer without a name (group, shape): {unnamed}; "
            "pass named_parameters=model.named_parameters() of the whole model"
        )
    strangers = [name for name, p in pairs if p.requires_grad and id(p) not in members]
    if strangers:
        raise ValueError(
            f"trainable parameters that the optimizer does not have: {strangers}; "
            "give them to it, leave them out of named_parameters, or freeze them with requires_grad_(False)"
        )
    return dict(pairs)


def trained_of(named: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Parameters that are exchanged: neither frozen nor empty. ValueError where there are none."""
    trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
    if not trained:
        frozen = sum(not p.requires_grad for p in named.values())
        raise ValueError(
            f"of the {len(named)} parameters given none can be trained, {frozen} frozen, {len(named) - frozen} empty: "
            f"call requires_grad_(True) on those to be trained before a {what} is made of them"
        )
    return trained


def refuse_changes(optimizer: Optimizer, named: Mapping[str, Tensor], trained: Mapping[str, Tensor], what: str) -> None:
    """Raises ValueError where what the optimizer would step is no longer what is exchanged.

    A parameter that is not exchanged would be stepped with the gradient of each rank alone; one that was frozen would
    still be moved, by the mean of the others' residuals, momentum and weight decay.
    requires_grad counts, not only a gradient, because ranks that made the same change must all raise.
    """
    known = {id(p) for p in trained.values()}
    strangers = [
        (g, p)
        for g, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if id(p) not in known and p.numel() and (p.requires_grad or p.grad is not None)
    ]
    frozen = [name for name, p in trained.items() if not p.requires_grad]
    remedy = (
        f"before the next backward make a new {what} of the wrapped one, optimizer.optimizer, on every "
        "rank: that one's state stays, what was kept beside it begins anew"
    )
    if strangers:
        names = {id(p): name for name, p in named.items()}
        added = [names.get(id(p), f"(group {g}, shape {tuple(p.shape)})") for g, p in strangers]
        raise ValueError(
            f"parameters of the optimizer that have a gradient, or would get one, but are not exchanged: {added}; they "
            f"were unfrozen, or added to the wrapped optimizer, later: {remedy}"
        )
    if frozen:
        raise ValueError(f"parameters that were frozen later, but are exchanged: {frozen}; unfreeze them, or {remedy}")


class Replaced:
    """Parameters that a module has replaced by others since; a look at it costs nothing.

    `load_state_dict(assign=True)` replaces them, and so does `module.weight = nn.Parameter(…)`: an optimizer over the
    old ones would train what nothing uses any more. torch has one hook for all parameters that modules are given: there
    is a single one of ours, and it stays.

    named: by name, kept alive by the holder of this object. owner: the wrapper of their optimizer.
    """

    def __init__(self, named: Mapping[str, Tensor], owner: str) -> None:
        self._names, self._owner = {id(p): name for name, p in named.items()}, owner
        self._gone: dict[int, tuple[str, Tensor]] = {}
        _hooked()
        _WATCHING.add(self)

    def note(self, old: Tensor, new: Tensor) -> None:
        """Notes that a module has `new` in the place of `old` from now on."""
        self._gone.pop(id(new), None)
        if id(old) in self._names and id(new) not in self._names:
            self._gone[id(old)] = self._names[id(old)], old

    def refuse(self) -> None:
        """Raises ValueError where parameters were replaced, before they are stepped.

        One that still gets gradients is in use: another module that shared it has let go of it.
        """
        lost = [name for name, p in self._gone.values() if p.grad is None or not bool(p.grad.any())]
        if lost:
            first, more = lost[0], len(lost) - 1
            raise ValueError(
                f"the model has other parameters now than this {self._owner} was made of: {first!r}"
                f"{f' and {more} more' if more else ''} of {len(self._names)} were replaced, as "
                "load_state_dict(..., assign=True) does, so that a step would train what the model no longer uses: "
                f"load with assign=False, or make optimizer and {self._owner} anew, on every rank"
            )


_WATCHING: WeakSet[Replaced] = WeakSet()


@cache
def _hooked() -> Any:
    return register_module_parameter_registration_hook(_registered)


def _registered(module: nn.Module, name: str, new: Tensor) -> None:
    old = module._parameters.get(name)
    if old is not None and old is not new:
        for watching in list(_WATCHING):
            watching.note(old, new)


def _numbered(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    pairs: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"parameter {len(pairs) + i}" for i in range(len(group["params"]))]
        pairs += zip(names, group["params"], strict=True)
    return pairs
