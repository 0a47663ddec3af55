"""Named parameters of a distributed optimizer, and checks that none is left out, at first and later."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def check_named_parameters(pairs: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Checks pairs as `model.named_parameters()` gives them.

        named = check_named_parameters(list(model.named_parameters()))

    Args:
        pairs: Names and parameters.

    Returns:
        Parameters by name, without what torch.compile adds to names: states are of compiled models and of others.

    Raises:
        TypeError: An entry is no pair of name and tensor, or a trainable parameter is not floating-point.
        ValueError: A name, or a parameter, is there twice, or a parameter is on the meta device.
    """
    for pair in pairs:
        match pair:
            case (str(), Tensor()):
                continue
        raise TypeError(
            f"named_parameters holds {type(pair).__name__}, expected pairs of name and tensor: "
            "pass model.named_parameters(), not model.parameters()"
        )
    if names := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"duplicate names in named_parameters: {names}; names must be unique")
    counts = Counter(id(parameter) for _, parameter in pairs)
    if twice := [name for name, parameter in pairs if counts[id(parameter)] > 1]:
        raise ValueError(f"one parameter under several names: {twice}; name each once")
    if empty := [name for name, p in pairs if p.device.type == "meta"]:
        raise ValueError(f"parameters on the meta device, which have no values: {empty}; to_empty() and initialise")
    if wrong := [f"{name} ({p.dtype})" for name, p in pairs if p.requires_grad and not p.is_floating_point()]:
        raise TypeError(f"parameters of a dtype that cannot be averaged: {wrong}; expected floating-point ones")
    return {name.replace("_orig_mod.", ""): p for name, p in pairs}


def check_buffers(model: nn.Module) -> None:
    """Raises ValueError, by name, for buffers that cannot be copied into, as all ranks' are."""
    named = model.named_buffers()
    if wrong := [name for name, b in named if b.layout != torch.strided or b.is_meta or _is_expanded(b)]:
        raise ValueError(
            f"buffers that are sparse, expanded or on the meta device, and cannot be copied into: {wrong}; register "
            "them dense, such as buffer.to_dense() or buffer.clone()"
        )


def _is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and count > 1 for count, step in zip(tensor.shape, tensor.stride(), strict=True))


def named_of(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[str, Tensor]:
    """All named parameters by name, checked against the optimizer's; None: its own, by its names or by number.

    Raises TypeError or ValueError as `check_named_parameters`, and ValueError for a parameter of the optimizer without
    a name and for a trainable one that the optimizer does not have.
    """
    pairs = _numbered(optimizer) if named_parameters is None else list(named_parameters)
    named = check_named_parameters(pairs)
    names = {id(parameter): name for name, parameter in pairs}
    members = {id(p): (g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if unnamed := [(g, tuple(p.shape)) for key, (g, p) in members.items() if key not in names]:
        raise ValueError(
            f"parameters of the optimizer without a name (group, shape): {unnamed}; "
            "pass named_parameters=model.named_parameters() of the whole model"
        )
    if strangers := [name for name, p in pairs if p.requires_grad and id(p) not in members]:
        raise ValueError(
            f"trainable parameters that the optimizer does not have: {strangers}; "
            "give them to it, leave them out of named_parameters, or freeze them with requires_grad_(False)"
        )
    return named


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


def _numbered(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    pairs: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"parameter {len(pairs) + i}" for i in range(len(group["params"]))]
        pairs += zip(names, group["params"], strict=True)
    return pairs


def described(named: Mapping[str, Tensor]) -> str:
    """Parameters in a few words, which differ for other names, shapes, dtypes or order."""
    listed = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named.items()]
    elements, crc = sum(p.numel() for p in named.values()), zlib.crc32(";".join(listed).encode())
    return f"{len(named)} parameters of {elements} elements, names and shapes {crc:08x}"
