"""Selections that an algorithm may prescribe instead of a compressor: the largest, all from a key on, blocks' largest.

Each is a callable from the accumulated tensor, 1-D, to the entries that are sent, and has the fused ``step`` of a
compressor (see ``FusedCompressor``). All take the largest magnitudes first, so NaN and inf are among what they send.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.gpu import kernels_take
from sparse_compress.native.selecting import Step, take_gradient
from sparse_compress.nonfinite import all_finite
from sparse_compress.topk import reachable, reaching, topk
from sparse_compress.vector import SparseVector


class Selection(Protocol):
    """Selection for one call, which error feedback can fuse with accumulating."""

    def __call__(self, accumulated: Tensor) -> SparseVector:
        """Entries of a 1-D tensor, with their values."""

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Fuses ``before.advance(gradient, momentum, out)``, a call on ``out.residual``, ``out.clear``, bit for bit."""


@dataclass(frozen=True)
class Largest:
    """Selects the k largest, ties to the lowest index (see ``topk``)."""

    k: int
    finds_nonfinite: ClassVar[bool] = True

    def __call__(self, accumulated: Tensor) -> SparseVector:
        return topk(accumulated, self.k)

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Takes the k largest in one sweep."""
        return step_topk(before, gradient, momentum, min(self.k, gradient.numel()), out)


@dataclass(frozen=True)
class Reaching:
    """Selects entries whose key (magnitude as an integer) is at least ``key``, the k largest where they are more."""

    key: int
    k: int
    finds_nonfinite: ClassVar[bool] = True

    def __call__(self, accumulated: Tensor) -> SparseVector:
        return reaching(accumulated, self.key, self.k)

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Takes the entries that reach ``key``, in one sweep where kernels can."""
        residual = out.residual.view(-1)
        if self.k > 0 and take_gradient(gradient):
            key = reachable(self.key, residual.dtype)
            return Step(before, gradient, momentum, out).reaching(len(residual), key, self.k)
        before.advance(gradient, momentum, out)
        sent = self(residual)
        out.clear(sent)
        return sent


@dataclass(frozen=True)
class LargestOfBlocks:
    """Selects the largest of every block [low, high), as many as its budget; of one without budget a NaN or inf.

    ``bounds``: bounds of the blocks, which make up the tensor, in order. ``budgets``: each at most the block's length.
    """

    bounds: Sequence[tuple[int, int]]
    budgets: Sequence[int]
    finds_nonfinite: ClassVar[bool] = True

    def __call__(self, accumulated: Tensor) -> SparseVector:
        blocks = [accumulated[low:high] for low, high in self.bounds]
        return self._join([_largest(block, k) for block, k in zip(blocks, self.budgets, strict=True)])

    def step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Takes the largest of every block, fused block by block."""
        if not gradient.is_contiguous():
            before.advance(gradient, momentum, out)
            sent = self(out.residual.view(-1))
            out.clear(sent)
            return sent
        if take_gradient(gradient) and all(
            budget or low == high for budget, (low, high) in zip(self.budgets, self.bounds, strict=True)
        ):
            return self._compiled_step(before, gradient, momentum, out)
        spans, flat = [slice(*edges) for edges in self.bounds], gradient.view(-1)
        parts = [(before.part(span), flat[span], out.part(span)) for span in spans]
        return self._join([_step(*part, momentum, k) for part, k in zip(parts, self.budgets, strict=True)])

    def _compiled_step(self, before: Accumulator, gradient: Tensor, momentum: float, out: Accumulator) -> SparseVector:
        """Writes every block straight into the vector of all."""
        sent = SparseVector.allocate(sum(self.budgets), gradient.numel(), torch.float32, gradient.device)
        step = Step(before, gradient, momentum, out, into=sent)
        for (low, high), budget in zip(self.bounds, self.budgets, strict=True):
            if budget:
                step.largest(low, high, budget)
        return sent

    def _join(self, chosen: Sequence[SparseVector]) -> SparseVector:
        values = [block.values for block in chosen]
        joined = SparseVector.allocate(sum(map(len, chosen)), self.bounds[-1][1], values[0].dtype, values[0].device)
        torch.cat(
            [block.indices + low for block, (low, _) in zip(chosen, self.bounds, strict=True)], out=joined.indices
        )
        torch.cat(values, out=joined.values)
        return joined


def step_topk(before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator) -> SparseVector:
    """Advances ``before`` by ``gradient`` into ``out`` (which may be ``before``), and takes the k largest out of it.

    It gives the bits of advance, topk and clear in turn, and runs those where no kernel takes the gradient.
    """
    if k and kernels_take(gradient):
        return _step_in_triton(before, gradient, momentum, k, out)
    if 0 < k < gradient.numel() and take_gradient(gradient):
        sent = SparseVector.allocate(k, gradient.numel(), torch.float32, gradient.device)
        Step(before, gradient, momentum, out, into=sent).largest(0, sent.numel, k)
        return sent
    before.advance(gradient, momentum, out)
    sent = topk(out.residual, k)
    out.clear(sent)
    return sent


def _step_in_triton(before: Accumulator, gradient: Tensor, momentum: float, k: int, out: Accumulator) -> SparseVector:
    from sparse_compress.gpu import select  # not before a GPU tensor comes: Triton is optional

    with torch.cuda.device(gradient.device):
        return select.step_topk(before, gradient, momentum, k, out)


def _largest(block: Tensor, k: int) -> SparseVector:
    if k:
        return topk(block, k)
    largest = topk(block, 1)  # inf and NaN are the largest
    return largest if not bool(all_finite(largest.values)) else topk(block, 0)


def _step(before: Accumulator, gradient: Tensor, out: Accumulator, momentum: float, k: int) -> SparseVector:
    if k:
        return step_topk(before, gradient, momentum, k, out)
    before.advance(gradient, momentum, out)
    sent = _largest(out.residual, 0)
    out.clear(sent)
    return sent
