"""Dense arrays in, dense arrays out: a sparse allreduce for programs that know no sparse vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from communicators.schedule import Schedule
from numpy.typing import NDArray
from sparse_compress import SparseVector, topk
from torch import Tensor

from sparse_collectives.reduction import Reduction

Array = TypeVar("Array", Tensor, NDArray[np.floating])


@dataclass(frozen=True, slots=True)
class DenseReduction(Generic[Array]):
    """A `Reduction` as dense arrays in the shape, dtype and kind (NumPy or torch) of what was given."""

    total: Array
    dropped: Array


def select(array: Tensor | NDArray[np.floating], k: int) -> SparseVector:
    """The k largest entries of a dense float array of any shape. Raises TypeError for other dtypes and layouts."""
    if not isinstance(array, Tensor) and array.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"the array has dtype {array.dtype}, expected float16, float32 or float64")
    return topk(_tensor(array), k)


def densify(reduction: Reduction, given: Array, sent: SparseVector) -> DenseReduction[Array]:
    """What was given but not sent was dropped too."""
    return _dense(reduction, _unsent(given, sent), given)


def densified(schedule: Schedule[Reduction], given: Array, sent: SparseVector) -> Schedule[DenseReduction[Array]]:
    """A schedule whose result is dense; what was given may change from now on."""
    return _densifying(schedule, _unsent(given, sent), given)


def _densifying(schedule: Schedule[Reduction], unsent: Tensor, given: Array) -> Schedule[DenseReduction[Array]]:
    return _dense((yield from schedule), unsent, given)


def _unsent(given: Array, sent: SparseVector) -> Tensor:
    """What was given, flat, as a copy, with zeros where it is sent."""
    flat = _tensor(given).reshape(-1).to(sent.dtype, copy=True)
    flat[sent.indices] = 0
    return flat


def _dense(reduction: Reduction, unsent: Tensor, given: Array) -> DenseReduction[Array]:
    unsent.index_add_(0, reduction.dropped.indices, reduction.dropped.values)
    return DenseReduction(_like(reduction.total.to_dense(), given), _like(unsent, given))


def _tensor(array: Tensor | NDArray[np.floating]) -> Tensor:
    """To read only: it may share the array's memory. Torch takes no negative strides, and warns of read-only memory."""
    if isinstance(array, Tensor):
        return array.detach()
    return torch.from_numpy(np.require(array, requirements=["C", "ALIGNED", "WRITEABLE"]))


def _like(flat: Tensor, given: Array) -> Array:
    shaped = flat.view(tuple(given.shape))
    if isinstance(given, Tensor):
        return shaped.to(given.dtype)
    return shaped.numpy().astype(given.dtype, copy=False)
