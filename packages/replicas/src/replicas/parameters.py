"""Named parameters of a distributed optimizer, and checks that none is left out, at first and later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer


def name_parameters(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """All named parameters by name, checked against the optimizer's.

    Raises TypeError for what is no pair of name and tensor or cannot be exchanged, ValueError for duplicates, for a
    parameter of the optimizer without a name and for a trainable one that the optimizer does not have.
    """
    pairs = list(named_parameters)
    check_pairs(pairs)
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


def refuse_changes(optimizer: Optimizer, names: Mapping[int, str], exchanged: Sequence[Tensor], *, what: str) -> None:
    """Raises ValueError where what the optimizer would step is no longer what is exchanged.

    A parameter that is not exchanged would be stepped with the gradient of each rank alone; one that was frozen would
    still be moved, by the mean of the others' residuals, momentum and weight decay.
    requires_grad counts, not only a gradient, because ranks that made the same change must all raise.
    names: by id, of the parameters that were named; what: wraps the optimizer.
    """
    known = {id(p) for p in exchanged}
    added = [
        names.get(id(p), f"(group {g}, shape {tuple(p.shape)})")
        for g, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if id(p) not in known and p.numel() and (p.requires_grad or p.grad is not None)
    ]
    frozen = [names[id(p)] for p in exchanged if not p.requires_grad]
    remedy = (
        f"before the next backward make a new {what} of the wrapped one, optimizer.optimizer, on every "
        "rank: that one's state stays, what was kept beside it begins anew"
    )
    if added:
        raise ValueError(
            f"parameters of the optimizer that have a gradient, or would get one, but are not exchanged: {added}; they "
            f"were unfrozen, or added to the wrapped optimizer, later: {remedy}"
        )
    if frozen:
        raise ValueError(f"parameters that were frozen later, but are exchanged: {frozen}; unfreeze them, or {remedy}")


def check_pairs(pairs: list[tuple[str, Tensor]]) -> None:
    """Raises TypeError for what is no pair of name and tensor or cannot be averaged, ValueError for duplicates."""
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
