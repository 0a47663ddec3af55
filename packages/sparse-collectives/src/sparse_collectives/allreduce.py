"""`sparse_allreduce`: one call for every algorithm."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
import torch
from communicators import Communicator, Work, as_communicator, run, start
from communicators.schedule import Schedule
from sparse_compress import SparseVector, add, merge
from torch import Tensor

from sparse_collectives.algorithms import algorithm_named
from sparse_collectives.arrays import Array, DenseReduction, densified, densify, select
from sparse_collectives.auto import AUTO, refuse_options, remembered
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State
from sparse_collectives.wire import PLAIN, wire_named


@overload
def sparse_allreduce(
    sparse: SparseVector,
    comm: Any,
    *,
    k: int,
    algorithm: str = ...,
    options: Mapping[str, Any] | None = ...,
    state: State | None = ...,
    wire: str = ...,
    timeout: float | None = ...,
) -> Reduction: ...


@overload
def sparse_allreduce(
    sparse: Array,
    comm: Any,
    *,
    k: int,
    algorithm: str = ...,
    options: Mapping[str, Any] | None = ...,
    state: State | None = ...,
    wire: str = ...,
    timeout: float | None = ...,
) -> DenseReduction[Array]: ...


def sparse_allreduce(
    sparse: Any,
    comm: Any,
    *,
    k: int,
    algorithm: str = "gtopk",
    options: Mapping[str, Any] | None = None,
    state: State | None = None,
    wire: str = "fp32",
    timeout: float | None = None,
) -> Reduction | DenseReduction[Any]:
    """The sum of sparse vectors over the ranks of `comm`.

        reduction = sparse_allreduce(topk(gradient, k), comm, k=k)
        mean = reduction.total.to_dense() / comm.size
        residual += reduction.dropped.to_dense()

    sparse: this rank's vector, float32 or float64. Fewer than k entries are filled up with explicit zeros at the lowest
        unused indices; of more, the k largest are sent, and the others are in `dropped`. Or a dense NumPy array or
        tensor of floats: its k largest entries are sent, and total and dropped are dense, of its kind and shape.
    comm: whatever `communicators.as_communicator` takes: an mpi4py or torch group, or a simulated world's communicator.
    k: the most entries that a rank may contribute. numel, dtype, k and algorithm must be the same on every rank.
    algorithm: a name in `ALGORITHMS`, or "auto": what is predicted to be fastest on these ranks, measured in the first
        call with these numel, k and dtype; it remembers that in `state`, {} at first.
    options: the algorithm's own settings, such as {"teams": 2} for "spardl"; the same on every rank. "auto" chooses
        them too.
    state: what the algorithm keeps between calls, from its `initial_state()`; changed in place.
    wire: a name in `WIRES`, the same on every rank: "fp32" (values as they are, int32 indices), or fewer bytes, as
        "bf16-packed"; what that rounds off is in `dropped`. float32 only, and not for "dense".
    timeout: seconds to wait for late ranks, default `comm.timeout`.

    With one rank the total is the input, filled up or cut.
    Raises TypeError or ValueError for arguments that are wrong by themselves, CollectiveError, the same on every rank,
    where ranks disagree or one of them fails.
    """
    comm = as_communicator(comm)
    if isinstance(sparse, np.ndarray) or (isinstance(sparse, Tensor) and sparse.layout == torch.strided):
        sent = select(sparse, k)
        schedule, facts = prepare(sent, comm, k, algorithm, options, state, wire)
        return densify(run(schedule, comm, facts=facts, timeout=timeout, device=sent.device), sparse, sent)
    schedule, facts = prepare(sparse, comm, k, algorithm, options, state, wire)
    return run(schedule, comm, facts=facts, timeout=timeout, device=sparse.device)


@overload
def sparse_allreduce_async(
    sparse: SparseVector,
    comm: Any,
    *,
    k: int,
    algorithm: str = ...,
    options: Mapping[str, Any] | None = ...,
    state: State | None = ...,
    wire: str = ...,
    timeout: float | None = ...,
) -> Work[Reduction]: ...


@overload
def sparse_allreduce_async(
    sparse: Array,
    comm: Any,
    *,
    k: int,
    algorithm: str = ...,
    options: Mapping[str, Any] | None = ...,
    state: State | None = ...,
    wire: str = ...,
    timeout: float | None = ...,
) -> Work[DenseReduction[Array]]: ...


def sparse_allreduce_async(
    sparse: Any,
    comm: Any,
    *,
    k: int,
    algorithm: str = "gtopk",
    options: Mapping[str, Any] | None = None,
    state: State | None = None,
    wire: str = "fp32",
    timeout: float | None = None,
) -> Work[Reduction] | Work[DenseReduction[Any]]:
    """Like `sparse_allreduce`, in the background: `wait()` gives what that returns.

    All ranks start their calls in the same order; several may be in flight, and complete in any order. The input is
    copied, so it may be changed, or sent again, at once.
    """
    comm = as_communicator(comm)
    if isinstance(sparse, np.ndarray) or (isinstance(sparse, Tensor) and sparse.layout == torch.strided):
        sent = select(sparse, k)
        schedule, facts = prepare(sent, comm, k, algorithm, options, state, wire)
        dense: Schedule[DenseReduction[Any]] = densified(schedule, sparse, sent)
        return start(dense, comm, facts=facts, timeout=timeout, device=sent.device)
    schedule, facts = prepare(sparse, comm, k, algorithm, options, state, wire)
    return start(schedule, comm, facts=facts, timeout=timeout, device=sparse.device)


def prepare(
    sparse: SparseVector,
    comm: Communicator,
    k: int,
    algorithm: str,
    options: Mapping[str, Any] | None,
    state: State | None,
    wire: str = "fp32",
) -> tuple[Schedule[Reduction], str]:
    """The schedule for a vector of any number of entries, and the facts that ranks must share."""
    _check(sparse)
    k = operator.index(k)
    if k < 1:
        raise ValueError(f"k is {k}, expected the most entries that a rank may contribute, 1 or more")
    wire_named(wire, dtype=sparse.dtype)
    if algorithm == AUTO:
        refuse_options(options)
        algorithm, options, state, wire = remembered(state, sparse, comm, k, wire)
    way = wire_named(wire) if comm.size > 1 else PLAIN  # alone, nothing travels and nothing is rounded
    entry = algorithm_named(algorithm, options, size=comm.size, wire=way)
    if not entry.compresses and wire != "fp32":
        raise ValueError(f"{algorithm} sums all values as they are, but wire={wire!r} was given: leave wire out")
    kept_between: dict[str, Any] = {}
    if entry.initial_state is not None:
        kept_between["state"] = entry.initial_state() if state is None else state
    elif state is not None:
        raise ValueError(f"{algorithm} keeps no state between calls: leave state out")
    # Every call stamps its own number into the payload it sends: calls must not share one, nor the caller's.
    own = SparseVector.unpack(sparse.pack().clone(), like=sparse)
    kept, cut = merge(own, SparseVector.empty(sparse.numel, sparse.dtype, device=sparse.device), k)
    schedule = _returning(cut, entry.schedule(kept, comm.rank, comm.size, k, **kept_between))
    in_fewer_bytes = [f"wire={wire}"] if way is not PLAIN else []
    settings = ", ".join([f"numel={sparse.numel}", f"{sparse.dtype}", f"k={k}", *entry.settings, *in_fewer_bytes])
    return schedule, f"{algorithm}({settings})"


def _returning(cut: SparseVector, schedule: Schedule[Reduction]) -> Schedule[Reduction]:
    """The schedule's result, with what was cut before it among the dropped."""
    reduction = yield from schedule
    return Reduction(reduction.total, add(reduction.dropped, cut))


def _check(sparse: SparseVector) -> None:
    if not isinstance(sparse, SparseVector):
        raise TypeError(
            f"sparse is {type(sparse).__name__}, expected a SparseVector: make one of a tensor with topk(tensor, k)"
        )
    if not sparse.numel:
        raise ValueError("sparse has numel=0, so there is nothing to sum: leave the call out on every rank")
