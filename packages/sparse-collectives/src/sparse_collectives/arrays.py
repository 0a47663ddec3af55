"""Dense arrays in, dense arrays out: a sparse allreduce for programs that know no sparse vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack

import numpy as np
import torch
from communicators import Communicator, Schedule, Work, as_communicator, run, schedules, start
from numpy.typing import NDArray
from sparse_compress import SparseVector, arguments, topk
from torch import Tensor

from sparse_collectives.algorithm import Reduction
from sparse_collectives.algorithms.table import AUTO, resolve
from sparse_collectives.allreduce import CallSettings, resolved, serving

Array = TypeVar("Array", Tensor, NDArray[np.floating])


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


def sparse_allreduce_array(
    array: Array, comm: Any, *, k: int | None = None, timeout: float | None = None, **settings: Unpack[CallSettings]
) -> DenseReduction[Array]:
    """The sum of dense arrays' k largest entries over the ranks of `comm`; by "dense", of all entries.

        reduction = sparse_allreduce_array(gradient, MPI.COMM_WORLD, k=100)
        residual += reduction.dropped

    Args:
        array: NumPy array or tensor of floats, of the same shape and dtype on every rank.
        comm: The ranks, as in `sparse_allreduce`.
        k: The most entries that a rank may contribute. Left out where "dense" sums all. ("auto" needs it; where that
            takes "dense", all of an array is summed.)
        timeout: Seconds to wait for late ranks, default `comm.timeout`.
        **settings: algorithm, options, state and wire: see `CallSettings`.

    Returns:
        The total and what was dropped here, of the array's kind, shape and dtype; of 16-bit floats in float32, so that
        nothing is lost by rounding.

    Raises:
        TypeError: An argument is of a wrong type, by itself: before anything is sent.
        ValueError: An argument does not fit, likewise.
        CollectiveError: The same on every rank: ranks disagree, or one of them fails.
    """
    comm = as_communicator(comm, patience=timeout)
    schedule, facts, device = _prepared(array, comm, k, **settings)
    return run(schedule, comm, facts=facts, timeout=timeout, device=device)


def sparse_allreduce_array_async(
    array: Array, comm: Any, *, k: int | None = None, timeout: float | None = None, **settings: Unpack[CallSettings]
) -> Work[DenseReduction[Array]]:
    """Like `sparse_allreduce_array`, in the background: `wait()` gives what that returns.

    The input is copied, so it may be changed at once.

    Args:
        array: As in `sparse_allreduce_array`; so are the others.
        comm: The ranks.
        k: The most entries that a rank may contribute.
        timeout: Seconds to wait for late ranks.
        **settings: algorithm, options, state and wire: see `CallSettings`.

    Raises:
        TypeError: As `sparse_allreduce_array`.
        ValueError: As `sparse_allreduce_array`. What happens later is raised by `wait()`.
    """
    comm = as_communicator(comm, patience=timeout)
    schedule, facts, device = _prepared(array, comm, k, **settings)
    return start(schedule, comm, facts=facts, timeout=timeout, device=device)


def _prepared(
    array: Any, comm: Communicator, k: int | None, **settings: Unpack[CallSettings]
) -> tuple[Schedule[DenseReduction[Any]], str, torch.device]:
    """Schedule, facts and device for a dense array: selected from, or summed by "dense"."""
    flat, shape, is_tensor = _flat_of(array), tuple(array.shape), isinstance(array, Tensor)
    algorithm = settings.get("algorithm", "gtopk")
    if not (isinstance(algorithm, str) and algorithm == AUTO) and not resolve(algorithm).selects:
        if k is not None:
            raise ValueError(f"dense sums all of an array, but k={k!r} was given: leave k out")
        k = max(len(flat), 1)
    like = SparseVector.empty(len(flat), flat.dtype, device=flat.device)
    entry, state, k = resolved(like, comm, k, **settings)

    def shaped(result: Tensor) -> Any:
        return result.view(shape) if is_tensor else result.view(shape).numpy()

    own, what = flat.to(like.dtype, copy=True), (f"shape={shape}", f"{flat.dtype}")
    if not entry.selects:
        return _summed(own, comm, shaped), entry.facts(*what), flat.device
    sent = topk(flat, k)
    own[sent.indices] = 0
    facts = entry.facts(*what, f"k={k}", state=state)
    schedule = serving(state, entry.call(sent, comm, k, state))
    return _densified(schedule, own, shaped), facts, flat.device


def _densified(
    schedule: Schedule[Reduction], unsent: Tensor, shaped: Callable[[Tensor], Any]
) -> Schedule[DenseReduction[Any]]:
    """Schedule with a dense result; what was given, but not sent, was dropped too."""
    reduction = yield from schedule
    unsent.index_add_(0, reduction.dropped.indices, reduction.dropped.values)
    return DenseReduction(shaped(reduction.total.to_dense()), shaped(unsent))


def _summed(own: Tensor, comm: Communicator, shaped: Callable[[Tensor], Any]) -> Schedule[DenseReduction[Any]]:
    """Schedule for the sum of all elements; nothing is dropped."""
    total = yield from schedules.allreduce(own, comm.rank, comm.size)
    return DenseReduction(shaped(total), shaped(torch.zeros_like(total)))


def _flat_of(array: Tensor | NDArray[np.floating]) -> Tensor:
    """The elements as a 1-D tensor, to read only: it may share the array's memory.

    Raises TypeError for other dtypes, byte orders and layouts, and for arrays that are more than their elements.
    """
    if isinstance(array, np.ndarray):
        return arguments.flatten(_from_numpy(array))
    if isinstance(array, SparseVector):
        raise TypeError("array is a SparseVector, expected a dense array: sparse_allreduce sums sparse vectors")
    if not isinstance(array, Tensor):
        raise TypeError(
            f"array is {type(array).__name__}, expected a dense array of floats, a NumPy array or a tensor: "
            "np.asarray(…) makes one of numbers"
        )
    if array.is_meta:
        raise TypeError("the tensor is on the meta device, which holds no elements: give one that has some")
    if hasattr(array, "__tensor_flatten__") and not array.is_nested:
        raise TypeError(f"{type(array).__name__} is made of other tensors: give its local one, as by .to_local()")
    return arguments.flatten(array)


def _from_numpy(array: NDArray[np.floating]) -> Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array was given, whose mask would be ignored: use .filled(0), or .data for all of it")
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(
            f"the array has dtype {array.dtype}, expected float16, float32 or float64 in this machine's byte order"
        )
    # Torch takes no negative strides, and warns of read-only memory.
    return torch.from_numpy(np.require(array, requirements=["C", "ALIGNED", "WRITEABLE"]))
