"""Checkpoints of periodic averaging, by parameter, so that they outlive another cut into vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from communicators import Communicator
from replicas import hash_bits
from torch import Tensor
from torch.optim import Optimizer

from local_sgd.averaging import Arrived
from local_sgd.block import Block
from local_sgd.parts import Part

ANEW = (
    "call drain() before state_dict(), and any rank's state and model may be loaded at any number of ranks; or start "
    "from a plain checkpoint of the model, made inside averaged_model(), with a new optimizer"
)
NEEDS = ("algorithm", "block", "kept", "rates", "parameters", "drained")


class Saved(Protocol):
    """Optimizer whose state is saved; see `PeriodicAveraging`."""

    anchors: tuple[str, ...]
    momenta: ClassVar[tuple[str, ...]]
    overlaps: ClassVar[bool]
    more: tuple[str, ...]
    optimizer: Optimizer
    param_groups: list[dict[str, Any]]

    @property
    def comm(self) -> Communicator: ...

    def more_state(self) -> dict[str, Any]: ...

    def check_more(self, state: Mapping[str, Any]) -> None: ...

    def load_more(self, state: dict[str, Any]) -> None: ...


def own_state(
    optimizer: Saved, parts: Sequence[Part], block: Block, arrived: Arrived | None, *, drained: bool
) -> dict[str, Any]:
    """This rank's own part of the state."""
    own = {
        "algorithm": type(optimizer).__name__,
        "block": block.state_dict(),
        "kept": {name: _by_name(parts, [part[name] for part in parts]) for name in _kept(optimizer)},
        "remainders": _remainders(parts),
        "rates": [_last_rate(parts, group) for group in range(len(optimizer.param_groups))],
        "parameters": digest({name: p for part in parts for name, p in zip(part.names, part.tensors, strict=True)}),
        "drained": drained,
        **optimizer.more_state(),
    }
    if arrived is not None:
        means = arrived.means or [torch.zeros_like(part[optimizer.anchors[0]]) for part in parts]
        own["arrived"] = {"means": _by_name(parts, means), "weight": arrived.weight, "unfinished": arrived.unfinished}
    return own


def check(optimizer: Saved, own: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Checks the own part of a state before anything is changed; raises ValueError."""
    what = type(optimizer).__name__
    if own["algorithm"] != what:
        raise ValueError(
            f"the state is of {own['algorithm']}, but this is {what}: to go on with another algorithm start from a "
            "plain checkpoint of the model, made inside averaged_model(), or after drain()"
        )
    shapes = {name: tuple(p.shape) for part in parts for name, p in zip(part.names, part.tensors, strict=True)}
    for what, tensors in _tensors(optimizer, own).items():
        saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wrong := sorted(set(saved.items()) ^ set(shapes.items())):
            raise ValueError(f"{what}: only the checkpoint, or only the model, has (name, shape) {wrong}")
    if len(own["rates"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(own['rates'])} parameter groups, the optimizer {len(optimizer.param_groups)}"
        )
    optimizer.check_more(own)


def load(
    optimizer: Saved,
    wrapped: dict[str, Any],
    own: dict[str, Any],
    parts: Sequence[Part],
    block: Block,
) -> Arrived | None:
    """Restores a state that `check` accepted; returns the saved mean of a launch, if the algorithm overlaps."""
    optimizer.optimizer.load_state_dict(wrapped)
    block.load_state_dict(own["block"])
    for part in parts:
        for name in _kept(optimizer):
            _copy(part, own["kept"][name], part[name])
        if part.remainder is not None:
            _copy(part, own["remainders"], part.remainder)
        part.last_rate = own["rates"][part.group]
    optimizer.load_more(own)
    if not optimizer.overlaps:
        return None
    arrived, means = own["arrived"], [torch.empty_like(part[optimizer.anchors[0]]) for part in parts]
    for part, mean in zip(parts, means, strict=True):
        _copy(part, arrived["means"], mean)
    return Arrived(means if arrived["weight"] else [], arrived["weight"], arrived["unfinished"])


def refuse_other_parameters(expected: int, trained: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError where the parameters are not those that went with the state."""
    if digest(trained) != expected:
        raise RuntimeError(
            "the parameters are not those that the loaded state was saved with: load this rank's own "
            "model.state_dict(), saved at the same point, after the optimizer was made (which copies rank 0's)"
        )


def _kept(optimizer: Saved) -> tuple[str, ...]:
    return optimizer.anchors + optimizer.momenta


def _tensors(optimizer: Saved, own: Mapping[str, Any]) -> dict[str, Mapping[str, Tensor]]:
    found = {name: own["kept"].get(name, {}) for name in _kept(optimizer)}
    return found | ({"arrived": own["arrived"]["means"]} if optimizer.overlaps else {})


def _by_name(parts: Sequence[Part], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: view for part, flat in zip(parts, flats, strict=True) for name, view in part.by_name(flat).items()}


def _remainders(parts: Sequence[Part]) -> dict[str, Tensor]:
    return {n: v for part in parts if part.remainder is not None for n, v in part.by_name(part.remainder).items()}


def _copy(part: Part, tensors: Mapping[str, Tensor], flat: Tensor) -> None:
    for name, view in part.by_name(flat).items():
        view.copy_(tensors[name])


def _last_rate(parts: Sequence[Part], group: int) -> float:
    return next((part.last_rate for part in parts if part.group == group), 0.0)


def digest(trained: Mapping[str, Tensor]) -> int:
    """Hash of all bits of the parameters, in the order of their names."""
    return int(hash_bits(torch.stack([hash_bits(trained[name]).cpu() for name in sorted(trained)])))
