"""Error feedback's state as plain dicts of tensors, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.vector_format import WIRE_DTYPES

KEYS = {"residuals", "velocities"}


def write_state(accumulators: Mapping[str, Accumulator]) -> dict[str, Any]:
    """``{"residuals": {name: tensor}, "velocities": {name: tensor}}``; without momentum there are no velocities."""
    return {
        "residuals": {name: known.residual for name, known in accumulators.items()},
        "velocities": {name: known.velocity for name, known in accumulators.items() if known.velocity is not None},
    }


def read_state(state: Mapping[str, Any], *, momentum: bool, known: Mapping[str, Accumulator]) -> dict[str, Accumulator]:
    """Checked copies of what ``write_state`` wrote, on the devices of those already ``known``.

    Raises ValueError that says what does not fit.
    """
    if not isinstance(state, Mapping) or set(state) != KEYS:
        raise ValueError(f"expected a dict with the keys {sorted(KEYS)}, got {_summary(state)}")
    residuals, velocities = state["residuals"], state["velocities"]
    for part, tensors in state.items():
        if not isinstance(tensors, Mapping):
            raise ValueError(f"{part}: expected a dict of tensors by name, got {_summary(tensors)}")
    expected = list(residuals) if momentum else []
    if set(velocities) != set(expected):
        raise ValueError(
            f"velocities of {list(velocities)} given, expected those of {list(expected)}: "
            "the state was saved with another momentum setting, or is incomplete"
        )
    for name, residual in residuals.items():
        _check_tensor(f"residual of {name!r}", residual, known[name].residual if name in known else None)
        if momentum:
            _check_tensor(f"velocity of {name!r}", velocities[name], residual)
    return {name: _accumulator(residual, velocities.get(name), known.get(name)) for name, residual in residuals.items()}


def _accumulator(residual: Tensor, velocity: Tensor | None, known: Accumulator | None) -> Accumulator:
    device = residual.device if known is None else known.residual.device
    return Accumulator(_own(residual, device), None if velocity is None else _own(velocity, device))


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _check_tensor(what: str, tensor: object, like: Tensor | None) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got {_summary(tensor)}")
    if tensor.dtype not in WIRE_DTYPES.values():
        raise ValueError(f"{what}: dtype is {tensor.dtype}, expected torch.float32 or torch.float64")
    if like is not None and (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"{what}: {tuple(tensor.shape)} of {tensor.dtype}, expected {tuple(like.shape)} of {like.dtype}"
        )


def _summary(given: object) -> str:
    return f"a dict with the keys {sorted(map(str, given))}" if isinstance(given, Mapping) else type(given).__name__
