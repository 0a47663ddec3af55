"""What every sparse vector holds: indices that increase strictly, within their range."""

from torch import Tensor

from sparse_compress.native import dense


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
        return dense.increasing(indices)
    given = indices.numpy() if indices.is_cpu else indices
    return bool((given[1:] > given[:-1]).all())
