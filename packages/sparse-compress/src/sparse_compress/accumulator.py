"""What error feedback keeps of one tensor, and one step of its recursion."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_compress.chunks import CHUNK
from sparse_compress.native.dense import add_at, take
from sparse_compress.vector import SparseVector
from sparse_compress.vector_format import WIRE_DTYPES

ONE_THREAD = 30_000  # elements: torch wakes other threads for 32,768 and more


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

    def parts(self) -> list[Tensor]:
        """The residual, and the velocity where there is one."""
        return [self.residual] if self.velocity is None else [self.residual, self.velocity]

    def clone(self) -> Self:
        """A copy in memory of its own."""
        return type(self)(self.residual.clone(), None if self.velocity is None else self.velocity.clone())

    def part(self, span: slice) -> Self:
        """A span of the flat tensors, over the same memory."""
        velocity = None if self.velocity is None else self.velocity.view(-1)[span]
        return type(self)(self.residual.view(-1)[span], velocity)

    def copies(self, spans: Sequence[slice]) -> list[list[Tensor]]:
        """Copies of spans of the flat tensors."""
        return [[tensor[span].clone() for span in spans] for tensor in self.flat()]

    def fill(self, spans: Sequence[slice], values: float | list[list[Tensor]]) -> None:
        """Set spans of the flat tensors, to one number or to ``copies`` of them."""
        for i, tensor in enumerate(self.flat()):
            for j, span in enumerate(spans):
                tensor[span] = values[i][j] if isinstance(values, list) else values

    def advance(self, gradient: Tensor, momentum: float, out: "Accumulator") -> None:
        """u ← momentum·u + g; v ← v + u, or without momentum v ← v + g, written to ``out``, which may be self."""
        with np.errstate(all="ignore"):
            for _ in self.advance_by_chunks(gradient, momentum, out):
                pass

    def advance_by_chunks(self, gradient: Tensor, momentum: float, out: "Accumulator") -> Iterator[None]:
        """``advance``, stopping after each chunk of a contiguous CPU gradient: no n-sized copy in another dtype.

        NumPy adds these in this thread alone, whatever torch's number of threads: waking several for every chunk
        costs more than they save. Overflow, which is for the caller to find, is a warning unless NumPy is told not to.
        """
        if not gradient.is_cpu or not gradient.is_contiguous():
            _recur(torch, gradient, momentum, self.parts(), out.parts())
            yield
            return
        before, after = self._arrays(), out._arrays()
        for number, part in enumerate(torch.split(gradient.view(-1), CHUNK)):
            step, span = _converted(part, self.residual.dtype), slice(number * CHUNK, (number + 1) * CHUNK)
            _recur(np, step, momentum, [one[span] for one in before], [one[span] for one in after])
            yield

    def foresee(self, gradient: Tensor, momentum: float, stride: int) -> NDArray[np.floating[Any]]:
        """What ``advance`` will make of every ``stride``-th element of the residual, for a contiguous CPU gradient."""
        before = [part[::stride] for part in self._arrays()]
        after = [np.empty_like(part) for part in before]
        _recur(np, _converted(gradient.view(-1)[::stride], self.residual.dtype), momentum, before, after)
        return after[0]

    def clear(self, sent: SparseVector) -> None:
        """Set residual and velocity to zero where entries were sent (DGC's factor masking)."""
        for tensor in self.flat():
            if tensor.is_cpu:
                tensor.numpy()[sent.indices.numpy()] = 0
            else:
                tensor.index_fill_(0, sent.indices.long(), 0)

    def restore(self, dropped: SparseVector) -> None:
        """v ← v + dropped."""
        if take(self.residual):
            add_at(self.residual, dropped)
            return
        self.residual.view(-1).index_add_(0, dropped.indices, dropped.values)

    def _arrays(self) -> list[NDArray[np.floating[Any]]]:
        return [part.numpy() for part in self.flat()]

    def flat(self) -> list[Tensor]:
        """The parts as 1-D tensors, over the same memory."""
        return [part.view(-1) for part in self.parts()]


def _converted(part: Tensor, dtype: torch.dtype) -> NDArray[np.floating[Any]]:
    """A 1-D CPU tensor as an array of ``dtype``, by this thread alone."""
    if part.dtype == dtype:
        return part.numpy()
    converted = torch.empty(len(part), dtype=dtype)
    for piece, source in zip(torch.split(converted, ONE_THREAD), torch.split(part, ONE_THREAD), strict=True):
        piece.copy_(source)
    return converted.numpy()


def _recur(library: Any, gradient: Any, momentum: float, before: list[Any], after: list[Any]) -> None:
    """The recursion in torch or NumPy, on residual and velocity, or on the residual alone."""
    if len(before) == 1:
        library.add(before[0], gradient, out=after[0])
        return
    (residual, velocity), (new_residual, new_velocity) = before, after
    library.multiply(velocity, momentum, out=new_velocity)
    library.add(new_velocity, gradient, out=new_velocity)
    library.add(residual, new_velocity, out=new_residual)
