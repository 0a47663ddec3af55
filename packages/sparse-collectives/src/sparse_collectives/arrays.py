"""Dense arrays in, dense arrays out: a sparse allreduce for programs that know no sparse vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from communicators import Schedule, schedules
from numpy.typing import NDArray
from sparse_compress import SparseVector
from sparse_compress.arguments import flatten
from sparse_compress.vector_format import WIRE_DTYPES
from torch import Tensor

from sparse_collectives.reduction import Reduction

Array = TypeVar("Array", Tensor, NDArray[np.floating])
FLOATS = (np.float16, np.float32, np.float64)


@dataclass(frozen=True, slots=True)
class DenseReduction(Generic[Array]):
    """A `Reduction` as dense arrays in the shape and kind (NumPy or torch) of what was given.

    In its dtype too, but for 16-bit floats, which are summed in float32 and given back in it: rounding them here would
    lose what no residual has.

    Attributes:
        total: The agreed sum, the same bits on every rank.
        dropped: What this rank must add to its residual.
    """

    total: Array
    dropped: Array


class Form(NamedTuple):
    """Shape, dtype and kind of an array, as they are now. Ranks must share all three."""

    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool

    def made_of(self, flat: Tensor) -> Any:
        """The elements in this form."""
        shaped = flat.view(self.shape)
        return shaped if self.is_tensor else shaped.numpy()


def is_array(given: object) -> bool:
    """Whether it is a NumPy array or a tensor of any kind."""
    return isinstance(given, (np.ndarray, Tensor))


def form_of(array: Tensor | NDArray[np.floating]) -> Form:
    """Form that the result takes: that of the array."""
    return Form(tuple(array.shape), array.dtype, isinstance(array, Tensor))


def flat_of(array: Tensor | NDArray[np.floating]) -> Tensor:
    """The elements as a 1-D tensor, to read only: it may share the array's memory.

    Raises TypeError for other dtypes, byte orders and layouts, and for arrays that are more than their elements.
    """
    return flatten(_plain(array) if isinstance(array, Tensor) else _from_numpy(array))


def densified(schedule: Schedule[Reduction], flat: Tensor, sent: SparseVector, form: Form) -> Schedule[Any]:
    """A schedule whose result is dense; what was given, but not sent, was dropped too. `flat` may change at once."""
    unsent = flat.to(sent.dtype, copy=True)
    unsent[sent.indices] = 0
    return _densifying(schedule, unsent, form)


def summed(flat: Tensor, rank: int, size: int, form: Form) -> Schedule[Any]:
    """A schedule for the sum of all elements; nothing is dropped. `flat` may change at once."""
    return _summing(flat.to(WIRE_DTYPES[flat.dtype], copy=True), rank, size, form)


def _densifying(schedule: Schedule[Reduction], unsent: Tensor, form: Form) -> Schedule[DenseReduction[Any]]:
    reduction = yield from schedule
    unsent.index_add_(0, reduction.dropped.indices, reduction.dropped.values)
    return DenseReduction(form.made_of(reduction.total.to_dense()), form.made_of(unsent))


def _summing(flat: Tensor, rank: int, size: int, form: Form) -> Schedule[DenseReduction[Any]]:
    total = yield from schedules.allreduce(flat, rank, size)
    return DenseReduction(form.made_of(total), form.made_of(torch.zeros_like(total)))


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise TypeError("the tensor is on the meta device, which holds no elements: give one that has some")
    if hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested:
        raise TypeError(f"{type(tensor).__name__} is made of other tensors: give its local one, as by .to_local()")
    return tensor


def _from_numpy(array: NDArray[np.floating]) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array was given, whose mask would be ignored: use .filled(0), or .data for all of it")
    if not any(array.dtype == known for known in FLOATS):
        raise TypeError(
            f"the array has dtype {array.dtype}, expected float16, float32 or float64 in this machine's byte order"
        )
    # Torch takes no negative strides, and warns of read-only memory.
    return torch.from_numpy(np.require(array, requirements=["C", "ALIGNED", "WRITEABLE"]))
