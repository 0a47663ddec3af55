"""Residual and velocity of one tensor, one step of their recursion, and their saved form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sparse_compress.arguments import WIRE_DTYPES
from sparse_compress.native.library import kernels
from sparse_compress.vector import SparseVector


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

    def take_out(self, sent: SparseVector) -> None:
        """v ← v − s, and u ← 0 where entries were sent (DGC's factor masking); what is not finite leaves nothing.

        Where all of them were sent u stays, because nothing waits: momentum is plain then.
        """
        residual, *velocity = self.flat()
        if len(sent) == sent.numel:
            for tensor in velocity:
                tensor.nan_to_num_(0.0, 0.0, 0.0)
            velocity = []
        if library := kernels(residual):
            library.sc_take_out(residual.data_ptr(), velocity[0].data_ptr() if velocity else None, *sent.run)
            return
        at = sent.indices.long()
        residual.index_copy_(0, at, (residual[at] - sent.values).nan_to_num_(0.0, 0.0, 0.0))
        for tensor in velocity:
            tensor.index_fill_(0, at, 0)

    def flat(self) -> list[Tensor]:
        """Parts as 1-D tensors, over the same memory."""
        return [part.view(-1) for part in (self.residual, self.velocity) if part is not None]


def write_state(accumulators: Mapping[str, Accumulator]) -> dict[str, Any]:
    """``{"residuals": {name: tensor}, "velocities": {name: tensor}}``; without momentum there are no velocities."""
    return {
        "residuals": {name: known.residual for name, known in accumulators.items()},
        "velocities": {name: known.velocity for name, known in accumulators.items() if known.velocity is not None},
    }


def read_state(state: Mapping[str, Any], *, momentum: bool, known: Mapping[str, Accumulator]) -> dict[str, Accumulator]:
    """Checked copies of the tensors that ``write_state`` wrote, on the devices of those already ``known``.

    Raises:
        ValueError: The state does not fit; the message says where.
    """
    residuals, velocities = state["residuals"], state["velocities"]
    expected = list(residuals) if momentum else []
    if set(velocities) != set(expected):
        raise ValueError(
            f"velocities of {list(velocities)} given, expected those of {expected}: "
            "the state was saved with another momentum setting, or is incomplete"
        )
    return {
        name: Accumulator(
            _copy(f"residual of {name!r}", residual, like := known[name].residual if name in known else residual),
            _copy(f"velocity of {name!r}", velocities[name], like) if momentum else None,
        )
        for name, residual in residuals.items()
    }


def _copy(what: str, tensor: Tensor, like: Tensor) -> Tensor:
    if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"{what}: {tuple(tensor.shape)} of {tensor.dtype}, expected {tuple(like.shape)} of {like.dtype}"
        )
    return tensor.detach().to(like.device, copy=True, memory_format=torch.contiguous_format)
