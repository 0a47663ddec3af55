"""`sparse_allreduce`: one call for every algorithm."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, overload

import torch
from communicators import Communicator, Schedule, Work, as_communicator, run, start
from sparse_compress import SparseVector, add, merge, topk
from sparse_compress.arguments import integer

from sparse_collectives.algorithm import Algorithm
from sparse_collectives.algorithms.table import AUTO, known, resolve
from sparse_collectives.arrays import Array, DenseReduction, densified, flat_of, form_of, is_array, summed
from sparse_collectives.prediction.auto import refuse_options, remembered
from sparse_collectives.reduction import Reduction
from sparse_collectives.state import State, check_is_state
from sparse_collectives.wire.wire import wire_named

CHOSEN = {"algorithm", "options", "wire", "state", "table"}
"""What "auto" remembers of a choice."""


@overload
def sparse_allreduce(
    sparse: SparseVector,
    comm: Any,
    *,
    k: int,
    algorithm: str | Algorithm = ...,
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
    k: int | None = ...,
    algorithm: str | Algorithm = ...,
    options: Mapping[str, Any] | None = ...,
    state: State | None = ...,
    wire: str = ...,
    timeout: float | None = ...,
) -> DenseReduction[Array]: ...


def sparse_allreduce(
    sparse: Any,
    comm: Any,
    *,
    k: int | None = None,
    algorithm: str | Algorithm = "gtopk",
    options: Mapping[str, Any] | None = None,
    state: State | None = None,
    wire: str = "fp32",
    timeout: float | None = None,
) -> Reduction | DenseReduction[Any]:
    """The sum of sparse vectors over the ranks of `comm`.

        reduction = sparse_allreduce(topk(gradient, k), comm, k=k)
        reduction.mean(out=gradient)  # over ranks; the sum is reduction.total
        residual += reduction.dropped.to_dense()

    With one rank the total is the input, filled up or cut.

    Args:
        sparse: This rank's vector, float32 or float64. Fewer than k entries are filled up with explicit zeros at the
            lowest unused indices; of more, the k largest are sent, and the others are in `dropped`. Or a dense NumPy
            array or tensor of floats, of the same shape and dtype on every rank: its k largest entries are sent, by
            "dense" all of it, and total and dropped are dense, of its kind, shape and dtype; of 16-bit floats in
            float32, so that nothing is lost by rounding.
        comm: Whatever `communicators.as_communicator` takes: an mpi4py or torch group, or a simulated world's
            communicator.
        k: The most entries that a rank may contribute. numel, dtype, k and algorithm must be the same on every rank.
            Left out where "dense" sums an array. ("auto" needs it; where that takes "dense", all of an array is
            summed.)
        algorithm: A name in `ALGORITHMS`, an `Algorithm` of one's own, or "auto": what is predicted to be fastest on
            these ranks, measured in the first call with these numel, k and dtype; it remembers that in `state`, {} at
            first.
        options: The algorithm's own settings, such as {"teams": 2} for "spardl"; the same on every rank. "auto" chooses
            them too.
        state: What the algorithm keeps between calls: {} for "auto", else from its entry's `initial_state()` where it
            has one; changed in place.
        wire: A name in `WIRES`, the same on every rank: "fp32" (values as they are, int32 indices), or fewer bytes, as
            "bf16-packed"; what that rounds off is in `dropped`. float32 only, and not for "dense".
        timeout: Seconds to wait for late ranks, default `comm.timeout`.

    Returns:
        The total and what was dropped here, as vectors, or dense for a dense input.

    Raises:
        TypeError: An argument is of a wrong type, by itself: before anything is sent.
        ValueError: An argument does not fit, likewise.
        CollectiveError: The same on every rank: ranks disagree, or one of them fails.
    """
    comm = as_communicator(comm, patience=timeout)
    schedule, facts, device = _prepared(sparse, comm, k, algorithm, options, state, wire)
    reduction: Reduction | DenseReduction[Any] = run(schedule, comm, facts=facts, timeout=timeout, device=device)
    return reduction


@overload
def sparse_allreduce_async(
    sparse: SparseVector,
    comm: Any,
    *,
    k: int,
    algorithm: str | Algorithm = ...,
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
    k: int | None = ...,
    algorithm: str | Algorithm = ...,
    options: Mapping[str, Any] | None = ...,
    state: State | None = ...,
    wire: str = ...,
    timeout: float | None = ...,
) -> Work[DenseReduction[Array]]: ...


def sparse_allreduce_async(
    sparse: Any,
    comm: Any,
    *,
    k: int | None = None,
    algorithm: str | Algorithm = "gtopk",
    options: Mapping[str, Any] | None = None,
    state: State | None = None,
    wire: str = "fp32",
    timeout: float | None = None,
) -> Work[Reduction] | Work[DenseReduction[Any]]:
    """Like `sparse_allreduce`, in the background: `wait()` gives what that returns.

    All ranks start their calls in the same order; several may be in flight, and complete in any order. The input is
    copied, so it may be changed, or sent again, at once.

    Args:
        sparse: As in `sparse_allreduce`; so are the others.
        comm: The ranks.
        k: The most entries that a rank may contribute.
        algorithm: A name, an `Algorithm` of one's own, or "auto".
        options: The algorithm's own settings.
        state: What the algorithm keeps between calls; changed in place where a call succeeds.
        wire: A name in `WIRES`.
        timeout: Seconds to wait for late ranks.

    Raises:
        TypeError: As `sparse_allreduce`.
        ValueError: As `sparse_allreduce`. What happens later is raised by `wait()`.
    """
    comm = as_communicator(comm, patience=timeout)
    schedule, facts, device = _prepared(sparse, comm, k, algorithm, options, state, wire)
    return start(schedule, comm, facts=facts, timeout=timeout, device=device)


def prepare(
    sparse: SparseVector,
    comm: Communicator,
    k: int,
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None,
    state: State | None,
    wire: str = "fp32",
) -> tuple[Schedule[Reduction], str]:
    """The schedule for a vector of any number of entries, and the facts that ranks must share."""
    _refuse_empty(sparse.numel)
    k = _most_entries(k)
    entry, kept = _resolved(sparse, comm, k, algorithm, options, state, wire)
    # Every call stamps its own number into the payload it sends: calls must not share one, nor the caller's.
    schedule = scheduled(sparse.clone(), comm, k, entry, kept)
    return schedule, entry.facts(f"numel={sparse.numel}", f"{sparse.dtype}", f"k={k}")


def _prepared(
    given: Any,
    comm: Communicator,
    k: int | None,
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None,
    state: State | None,
    wire: str,
) -> tuple[Schedule[Any], str, torch.device]:
    """`prepare` for whatever can be given, and the device that it is on."""
    if isinstance(given, SparseVector):
        return *prepare(given, comm, _most_entries(k), algorithm, options, state, wire), given.device
    if not is_array(given):
        raise TypeError(
            f"sparse is {type(given).__name__}, expected a SparseVector, as topk(tensor, k) makes it, or a dense "
            "array of floats, a NumPy array or a tensor: np.asarray(…) makes one of numbers"
        )
    return _prepared_array(given, comm, k, algorithm, options, state, wire)


def _prepared_array(
    array: Any,
    comm: Communicator,
    k: int | None,
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None,
    state: State | None,
    wire: str,
) -> tuple[Schedule[Any], str, torch.device]:
    """Schedule, facts and device for a dense array: selected from, or summed by "dense"."""
    flat, form = flat_of(array), form_of(array)
    _refuse_empty(len(flat))
    whole = not (isinstance(algorithm, str) and algorithm == AUTO) and not known(algorithm).selects
    if whole and k is not None:
        raise ValueError(f"dense sums all of an array, but k={k!r} was given: leave k out")
    k = len(flat) if whole else _most_entries(k)
    like = SparseVector.empty(len(flat), flat.dtype, device=flat.device)
    entry, kept = _resolved(like, comm, k, algorithm, options, state, wire)
    what = (f"shape={form.shape}", f"{flat.dtype}")
    if not entry.selects:
        return summed(flat, comm.rank, comm.size, form), entry.facts(*what), flat.device
    sent = topk(flat, k)
    schedule = densified(scheduled(sent, comm, k, entry, kept), flat, sent, form)
    return schedule, entry.facts(*what, f"k={k}"), flat.device


def _resolved(
    like: SparseVector,
    comm: Communicator,
    k: int,
    algorithm: str | Algorithm,
    options: Mapping[str, Any] | None,
    state: State | None,
    wire: str,
) -> tuple[Algorithm, dict[str, State]]:
    """The algorithm of one call with its options and wire, and its state as a keyword, where it has one.

    like: a vector of the numel, dtype and device in question. Raises TypeError and ValueError for what is wrong.
    """
    if isinstance(algorithm, str) and algorithm == AUTO:
        wire_named(wire, dtype=like.dtype)
        refuse_options(options)
        _check_remembered(state)
        algorithm, options, state, wire = remembered(state, like, comm, k, wire)
    entry = resolve(algorithm, options, size=comm.size, wire=wire, dtype=like.dtype)
    initial = entry.initial_state()
    if state is None:
        return entry, {} if initial is None else {"state": initial}
    if initial is None:
        raise ValueError(f"{entry.name} keeps no state between calls: leave state out")
    check_is_state(state, entry.name)
    entry.check_state(state)
    return entry, {"state": state}


def _check_remembered(state: State | None) -> None:
    if state is None:
        return
    check_is_state(state, AUTO)
    for choice in state.values():
        if not isinstance(choice, dict) or set(choice) != CHOSEN or not isinstance(choice["algorithm"], str):
            keys = sorted(map(str, state))
            raise ValueError(f'this is the state of another algorithm than "auto", with the keys {keys}: give {{}}')


def scheduled(
    own: SparseVector, comm: Communicator, k: int, entry: Algorithm, kept: Mapping[str, State]
) -> Schedule[Reduction]:
    """The schedule of one call of an algorithm whose options and wire are set.

    own: in memory that is this call's, with any number of entries. kept: its state as a keyword, where it has one.
    """
    cut = None
    if len(own) != min(k, own.numel):
        own, cut = merge(own, SparseVector.empty(own.numel, own.dtype, device=own.device), k)
    schedule = entry.schedule(own, comm.rank, comm.size, k, **kept)
    if not isinstance(schedule, Generator):
        raise TypeError(f"the schedule of {entry.name} is {schedule!r}, expected a generator that yields Rounds")
    return _returning(cut, schedule, entry.name, comm.size)


def _returning(cut: SparseVector | None, schedule: Schedule[Reduction], name: str, size: int) -> Schedule[Reduction]:
    """The schedule's result over so many ranks, with what was cut before it among the dropped."""
    reduction = yield from schedule
    if not isinstance(reduction, Reduction):
        raise TypeError(f"{name} returned {type(reduction).__name__}, expected a Reduction(total, dropped)")
    dropped = reduction.dropped if cut is None else add(reduction.dropped, cut)
    return Reduction(reduction.total, dropped, size)


def _most_entries(k: int | None) -> int:
    return integer(k, "k", least=1, expected="the most entries that a rank may contribute")


def _refuse_empty(numel: int) -> None:
    if not numel:
        raise ValueError("sparse has numel=0, so there is nothing to sum: leave the call out on every rank")
