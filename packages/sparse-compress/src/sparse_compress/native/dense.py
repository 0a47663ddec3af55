"""Between sparse and dense: what the kernels take, and where they put it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparse_compress.native.library import kernels


class Entries(Protocol):
    """What is asked of a sparse vector here."""

    dtype: torch.dtype

    def __len__(self) -> int: ...

    @property
    def is_cpu(self) -> bool:
        """Whether it lives on a CPU."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the first index and the first value."""

    @property
    def indices(self) -> Tensor:
        """1-D int32."""


def take(tensor: Tensor) -> bool:
    """Whether there are kernels, and they take this tensor: contiguous float32 on a CPU."""
    return tensor.dtype == torch.float32 and ready(tensor)


def ready(tensor: Tensor) -> bool:
    """Whether there are kernels, and they can read this tensor's memory: contiguous, on a CPU."""
    return tensor.is_cpu and kernels() is not None and tensor.is_contiguous()


def reaches(sparse: Entries) -> bool:
    """Whether there are kernels, and they can read this vector's indices: it is on a CPU."""
    return sparse.is_cpu and kernels() is not None


def takes(sparse: Entries) -> bool:
    """Whether there are kernels, and they take this vector: float32 on a CPU."""
    return sparse.dtype == torch.float32 and sparse.is_cpu and kernels() is not None


def put(addresses: tuple[int, int], entries: int, out: Tensor, divisor: float) -> None:
    """out ← 0, and values / divisor at the indices, which increase and lie at these addresses; out is taken."""
    kernels().sc_put(out.data_ptr(), out.numel(), *addresses, entries, divisor)


def finite(address: int, count: int) -> bool:
    """Whether so many float32 values there are all finite."""
    return bool(kernels().sc_finite(address, count))


def increasing(address: int, count: int, low: int, high: int) -> bool:
    """Whether so many int32 there increase strictly, and lie in low … high − 1."""
    return bool(kernels().sc_increasing(address, count, low, high))


def add_at(out: Tensor, sparse: Entries) -> None:
    """out ← out + values at the indices; both taken."""
    kernels().sc_add_at(out.data_ptr(), *sparse.addresses, len(sparse))
