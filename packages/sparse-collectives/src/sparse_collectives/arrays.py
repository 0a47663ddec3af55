"""Dense arrays in, dense arrays out: a sparse allreduce for programs that know no sparse vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
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
    if isinstance(array, Tensor):
        return topk(array.detach(), k)
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"the array has dtype {array.dtype}, expected float16, float32 or float64")
    return topk(torch.from_numpy(np.ascontiguousarray(array)), k)


def densify(reduction: Reduction, given: Array, sent: SparseVector) -> DenseReduction[Array]:
    """What was given but not sent was dropped too."""
    flat = torch.as_tensor(given).detach().reshape(-1).to(sent.dtype, copy=True)
    flat[sent.indices] = 0
    flat.index_add_(0, reduction.dropped.indices, reduction.dropped.values)
    return DenseReduction(_like(reduction.total.to_dense(), given), _like(flat, given))


def _like(flat: Tensor, given: Array) -> Array:
    shaped = flat.view(tuple(given.shape))
    if isinstance(given, Tensor):
        return shaped.to(given.dtype)
    return shaped.numpy().astype(given.dtype, copy=False)
