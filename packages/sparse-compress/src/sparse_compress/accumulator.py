"""Residual and velocity of one tensor, one step of their recursion, and their saved form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sparse_compress.native.dense import add_at
from sparse_compress.native.library import take
from sparse_compress.vector import SparseVector
from sparse_compress.vector_format import WIRE_DTYPES

KEYS = {"residuals", "velocities"}


@dataclass(frozen=True, eq=False)
class Accumulator:
    """Residual and velocity of one tensor.

    ``residual``: what was not sent yet; ``velocity``: the momentum that feeds it, None without momentum. Both are
    contiguous, of the gradient's shape and device, float32 (float64 for float64 gradients).
    """

    residual: Tensor
    velocity: Tensor | None

    @classmethod
    def zeros(cls, gradient: Tensor, *, momentum: bool) -> Self:
        """Accumulator before the first gradient: all zeros."""
        dtype = WIRE_DTYPES[gradient.dtype]
        residual = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        return cls(residual, torch.zeros_like(residual) if momentum else None)

    def parts(self) -> list[Tensor]:
        """Residual, and velocity where there is one."""
        return [self.residual] if self.velocity is None else [self.residual, self.velocity]

    def clone(self) -> Self:
        """Copy in memory of its own."""
        return type(self)(self.residual.clone(), None if self.velocity is None else self.velocity.clone())

    def part(self, span: slice) -> Self:
        """Span of the flat tensors, over the same memory."""
        velocity = None if self.velocity is None else self.velocity.view(-1)[span]
        return type(self)(self.residual.view(-1)[span], velocity)

    def copies(self, spans: Sequence[slice]) -> list[list[Tensor]]:
        """Copies of spans of the flat tensors."""
        return [[tensor[span].clone() for span in spans] for tensor in self.flat()]

    def fill(self, spans: Sequence[slice], values: float | list[list[Tensor]]) -> None:
        """Sets spans of the flat tensors, to one number or to ``copies`` of them."""
        for i, tensor in enumerate(self.flat()):
            for j, span in enumerate(spans):
                tensor[span] = values[i][j] if isinstance(values, list) else values

    def advance(self, gradient: Tensor, momentum: float, out: "Accumulator") -> None:
        """u ← momentum·u + g; v ← v + u, or without momentum v ← v + g, written to ``out``, which may be self."""
        step = gradient
        if self.velocity is not None:
            assert out.velocity is not None
            step = torch.mul(self.velocity, momentum, out=out.velocity).add_(step)
        torch.add(self.residual, step, out=out.residual)

    def clear(self, sent: SparseVector) -> None:
        """Sets residual and velocity to zero where entries were sent (DGC's factor masking)."""
        for tensor in self.flat():
            if tensor.is_cpu:
                tensor.numpy()[sent.indices.numpy()] = 0
            else:
                tensor.index_fill_(0, sent.indices.long(), 0)

    def restore(self, dropped: SparseVector) -> None:
        """v ← v + dropped."""
        if take(self.residual):
            add_at(self.residual, dropped.addresses, len(dropped))
            return
        self.residual.view(-1).index_add_(0, dropped.indices, dropped.values)

    def flat(self) -> list[Tensor]:
        """Parts as 1-D tensors, over the same memory."""
        return [part.view(-1) for part in self.parts()]


def write_state(accumulators: Mapping[str, Accumulator]) -> dict[str, Any]:
    """``{"residuals": {name: tensor}, "velocities": {name: tensor}}``; without momentum there are no velocities."""
    return {
        "residuals": {name: known.residual for name, known in accumulators.items()},
        "velocities": {name: known.velocity for name, known in accumulators.items() if known.velocity is not None},
    }


def read_state(state: Mapping[str, Any], *, momentum: bool, known: Mapping[str, Accumulator]) -> dict[str, Accumulator]:
    """Checked copies of what ``write_state`` wrote, on the devices of those already ``known``.

    Raises:
        ValueError: The state does not fit; the message says where.
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
