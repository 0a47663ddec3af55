"""Sparse entries put into a dense tensor."""

from torch import Tensor

from sparse_compress.native import dense


def put(out: Tensor, indices: Tensor, values: Tensor, *, divisor: float = 1.0) -> Tensor:
    """out ← 0, and values / divisor at the indices; returns ``out``.

    ``out``: contiguous, of the values' dtype and device. ``indices``: int32, increasing, within ``out``. All trusted.
    """
    if dense.take(out):
        dense.put((indices.data_ptr(), values.data_ptr()), indices.numel(), out, divisor)
        return out
    out.view(-1).zero_().index_copy_(0, indices.long(), values if divisor == 1 else values / divisor)
    return out
