"""Selection by the kernels, alone or as a step of error feedback."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparse_compress.accumulator import Accumulator
from sparse_compress.native.library import SCRATCH, kernels
from sparse_compress.native.sparse import copied
from sparse_compress.vector import SparseVector

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def take_gradient(gradient: Tensor) -> bool:
    """Whether the kernels take a step with this gradient: contiguous, on a CPU, of at most 32 bits."""
    return gradient.dtype in KINDS and gradient.is_cpu and kernels() is not None and gradient.is_contiguous()


def select(flat: Tensor, k: int) -> SparseVector:
    """Selects the k largest of a 1-D tensor, 0 < k ≤ n."""
    n = flat.numel()
    selected = SparseVector.allocate(k, n, torch.float32, flat.device)
    scratch = SCRATCH.of(_scratch_nbytes(n, k))
    kernels().sc_select(flat.data_ptr(), n, k, -1, 0, *selected.addresses, scratch)
    SCRATCH.trim()
    return selected


def select_reaching(flat: Tensor, key: int, k: int) -> SparseVector:
    """Selects the elements of a 1-D tensor whose key is ``key`` or larger, the k largest if more."""
    n = flat.numel()
    size = _scratch_nbytes(n, k)
    scratch = SCRATCH.of(size + 8 * k)
    count = kernels().sc_select(flat.data_ptr(), n, k, key, 0, scratch + size, scratch + size + 4 * k, scratch)
    return copied(scratch + size, scratch + size + 4 * k, count, n)


class Step:
    """One step of error feedback: accumulates, selects and clears, span by span.

    before, after: float32 and contiguous, like all accumulators; they may be the same. into: vector that `largest`
    fills, span by span.
    """

    def __init__(
        self,
        before: Accumulator,
        gradient: Tensor,
        momentum: float,
        after: Accumulator,
        *,
        into: SparseVector | None = None,
    ) -> None:
        (self._v, self._u), (self._vo, self._uo) = _addresses(before), _addresses(after)
        self._g, self._width = gradient.data_ptr(), gradient.element_size()
        self._kind, self._momentum = KINDS[gradient.dtype], momentum
        self._into, self._filled, self._library = into, 0, kernels()

    def largest(self, low: int, high: int, k: int) -> None:
        """Selects the k largest of elements low … high − 1, 0 < k ≤ high − low, and appends them to ``into``."""
        assert self._into is not None
        scratch = SCRATCH.of(_scratch_nbytes(high - low, k))
        indices, values = self._into.addresses
        self._run(low, high, k, -1, indices + 4 * self._filled, values + 4 * self._filled, scratch)
        self._filled += k
        SCRATCH.trim()

    def reaching(self, numel: int, key: int, k: int) -> SparseVector:
        """Selects the elements that reach ``key``, the k largest if more."""
        size = _scratch_nbytes(numel, k)
        scratch = SCRATCH.of(size + 8 * k)
        indices, values = scratch + size, scratch + size + 4 * k
        return copied(indices, values, self._run(0, numel, k, key, indices, values, scratch), numel)

    def _run(self, low: int, high: int, k: int, key: int, indices: int, values: int, scratch: int) -> int:
        at = 4 * low
        count: int = self._library.sc_step(
            self._v + at,
            self._u and self._u + at,
            self._g + self._width * low,
            self._kind,
            self._momentum,
            self._vo + at,
            self._uo and self._uo + at,
            high - low,
            k,
            key,
            low,
            indices,
            values,
            scratch,
        )
        return count


def _addresses(kept: Accumulator) -> tuple[int, Any]:
    """Addresses of residual and velocity; None without velocity."""
    return kept.residual.data_ptr(), None if kept.velocity is None else kept.velocity.data_ptr()


@lru_cache(maxsize=1024)
def _scratch_nbytes(n: int, k: int) -> int:
    """Bytes of scratch memory of a selection; cached, because a call into the library costs more."""
    nbytes: int = kernels().sc_scratch(n, k)
    return nbytes
