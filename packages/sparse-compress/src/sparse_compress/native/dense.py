"""Conversions and sums between sparse and dense vectors, by the kernels."""

from torch import Tensor

from sparse_compress.native.library import kernels


def put(addresses: tuple[int, int], entries: int, out: Tensor, divisor: float) -> None:
    """out ← 0, and values / divisor at the indices, which increase and lie at these addresses; out is taken."""
    kernels().sc_put(out.data_ptr(), out.numel(), *addresses, entries, divisor)


def finite(address: int, count: int) -> bool:
    """Whether the ``count`` float32 values at this address are all finite."""
    return bool(kernels().sc_finite(address, count))


def increasing(address: int, count: int, low: int, high: int) -> bool:
    """Whether the ``count`` int32 at this address increase strictly, and lie in low … high − 1."""
    return bool(kernels().sc_increasing(address, count, low, high))


def add_at(out: Tensor, addresses: tuple[int, int], entries: int) -> None:
    """out ← out + values at the indices, which lie at these addresses; out is taken."""
    kernels().sc_add_at(out.data_ptr(), *addresses, entries)
