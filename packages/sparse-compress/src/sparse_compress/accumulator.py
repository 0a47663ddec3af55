"""What error feedback keeps of one tensor, and one step of its recursion."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparse_compress.chunks import CHUNK
from sparse_compress.vector import SparseVector
from sparse_compress.wire import WIRE_DTYPES


@dataclass(frozen=True, eq=False)
class Accumulator:
    """``residual``: what was not sent yet; ``velocity``: the momentum that feeds it, None without momentum.

    Both contiguous, of the gradient's shape and device, float32 (float64 for float64 gradients).
    """

    residual: Tensor
    velocity: Tensor | None

    @classmethod
    def zeros(cls, gradient: Tensor, *, momentum: bool) -> Self:
        """What has accumulated before the first gradient: nothing."""
        dtype = WIRE_DTYPES[gradient.dtype]
        residual = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        return cls(residual, torch.zeros_like(residual) if momentum else None)

    def like(self) -> Self:
        """Uninitialised memory of the same kind."""
        velocity = None if self.velocity is None else torch.empty_like(self.velocity)
        return type(self)(torch.empty_like(self.residual), velocity)

    def parts(self) -> list[Tensor]:
        """The residual, and the velocity where there is one."""
        return [self.residual] if self.velocity is None else [self.residual, self.velocity]

    def clone(self) -> Self:
        """A copy in memory of its own."""
        return type(self)(self.residual.clone(), None if self.velocity is None else self.velocity.clone())

    def copies(self, spans: Sequence[slice]) -> list[list[Tensor]]:
        """Copies of spans of the flat tensors."""
        return [[tensor[span].clone() for span in spans] for tensor in self._flat()]

    def fill(self, spans: Sequence[slice], values: float | list[list[Tensor]]) -> None:
        """Set spans of the flat tensors, to one number or to ``copies`` of them."""
        for i, tensor in enumerate(self._flat()):
            for j, span in enumerate(spans):
                tensor[span] = values[i][j] if isinstance(values, list) else values

    def advance(self, gradient: Tensor, momentum: float, out: "Accumulator") -> None:
        """u ← momentum·u + g; v ← v + u, or without momentum v ← v + g, written to ``out``, which may be self."""
        for _ in self.advance_by_chunks(gradient, momentum, out):
            pass

    def advance_by_chunks(self, gradient: Tensor, momentum: float, out: "Accumulator") -> Iterator[None]:
        """``advance``, stopping after each chunk of a contiguous CPU gradient: no n-sized copy in another dtype."""
        if not gradient.is_cpu or not gradient.is_contiguous():
            self._advance(gradient, momentum, out)
            yield
            return
        flat = gradient.view(-1)
        for start in range(0, len(flat), CHUNK):
            span = slice(start, start + CHUNK)
            before = self[span]
            before._advance(flat[span], momentum, before if out is self else out[span])
            yield

    def __getitem__(self, span: slice) -> "Accumulator":
        """A span of the flat tensors, as views."""
        velocity = None if self.velocity is None else self.velocity.view(-1)[span]
        return Accumulator(self.residual.view(-1)[span], velocity)

    def _advance(self, gradient: Tensor, momentum: float, out: "Accumulator") -> None:
        if self.velocity is None or out.velocity is None:
            torch.add(self.residual, gradient, out=out.residual)
            return
        torch.mul(self.velocity, momentum, out=out.velocity).add_(gradient)
        torch.add(self.residual, out.velocity, out=out.residual)

    def clear(self, sent: SparseVector) -> None:
        """Set residual and velocity to zero where entries were sent (DGC's factor masking)."""
        for tensor in self._flat():
            tensor.index_fill_(0, sent.indices.long(), 0)

    def restore(self, dropped: SparseVector) -> None:
        """v ← v + dropped."""
        self.residual.view(-1).index_add_(0, dropped.indices, dropped.values)

    def _flat(self) -> list[Tensor]:
        return [part.view(-1) for part in self.parts()]
