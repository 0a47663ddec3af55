"""What every sparse vector holds: indices that increase strictly, within their range."""

from __future__ import annotations

from torch import Tensor

from sparse_compress.native import dense
from sparse_compress.vector_format import MAX_NUMEL


def check_entries(sparse: dense.Entries, low: int, high: int) -> None:
    """`check_indices` of a vector, without making a tensor of its indices where they are as they should be."""
    if not (dense.reaches(sparse) and dense.increasing(sparse.addresses[0], len(sparse), low, high)):
        check_indices(sparse.indices, low, high)


def check_indices(indices: Tensor, low: int, high: int) -> None:
    """Raises ValueError unless ``indices``, 1-D int32, increase strictly from ``low`` on, and stay below ``high``.

    On a CPU one pass; of a GPU two answers are read back.
    """
    if not len(indices):
        return
    given = indices.numpy() if indices.is_cpu else indices
    if not is_increasing(indices):
        raise ValueError("indices are not strictly increasing: sort them, and add up the values of equal ones")
    first, last = int(given[0]), int(given[-1])
    if first < low or last >= high:
        raise ValueError(f"indices run from {first} to {last}, expected {low} … {high - 1}")


def is_increasing(indices: Tensor) -> bool:
    """Whether ``indices``, 1-D int32, increase strictly; of a GPU the answer is read back."""
    if dense.ready(indices):
        return dense.increasing(indices.data_ptr(), indices.numel(), -MAX_NUMEL - 1, MAX_NUMEL + 1)
    given = indices.numpy() if indices.is_cpu else indices
    return bool((given[1:] > given[:-1]).all())
