"""`sparse_allreduce`: one call for every algorithm."""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack
from weakref import WeakValueDictionary

from communicators import Communicator, Schedule, Work, as_communicator, run, start
from sparse_compress import SparseVector, arguments

from sparse_collectives.algorithm import Algorithm, Reduction, State
from sparse_collectives.algorithms.table import AUTO, resolve
from sparse_collectives.prediction.auto import remembered

_UNDER_WAY: WeakValueDictionary[int, Schedule[Reduction]] = WeakValueDictionary()
"""Schedules that change a state when they end, by its id, which each of them keeps alive until then."""


class CallSettings(TypedDict, total=False):
    """Settings of a call, given as keywords; the same on every rank, but for the state.

    Attributes:
        algorithm: A name in `ALGORITHMS`, default "gtopk"; an `Algorithm` of one's own; or "auto": the one predicted to
            be fastest on these ranks, measured in the first call with these numel, k and dtype; it remembers that in
            `state`, {} at first.
        options: The algorithm's own settings, such as {"teams": 2} for "spardl". "auto" chooses them too.
        state: What the algorithm keeps between calls: {} for "auto", else from its entry's `initial_state()` where it
            has one; changed in place.
        wire: A name in `WIRES`: "fp32" (the default: values as they are, int32 indices), or fewer bytes, as
            "bf16-packed"; what that rounds off is in `dropped`. float32 only, and not for "dense".
    """

    algorithm: str | Algorithm
    options: Mapping[str, Any] | None
    state: State | None
    wire: str


def sparse_allreduce(
    sparse: SparseVector, comm: Any, *, k: int, timeout: float | None = None, **settings: Unpack[CallSettings]
) -> Reduction:
    """The sum of sparse vectors over the ranks of `comm`.

        reduction = sparse_allreduce(topk(gradient, k), comm, k=k)
        reduction.mean(out=gradient)  # over ranks; the sum is reduction.total
        residual += reduction.dropped.to_dense()

    With one rank the total is the input, filled up or cut.

    Args:
        sparse: This rank's vector, float32 or float64. Fewer than k entries are filled up with explicit zeros at the
            lowest unused indices; of more, the k largest are sent, and the others are in `dropped`.
        comm: Whatever `communicators.as_communicator` takes: an mpi4py or torch group, or a simulated world's
            communicator.
        k: The most entries that a rank may contribute. numel, dtype, k and algorithm must be the same on every rank.
        timeout: Seconds to wait for late ranks, default `comm.timeout`.
        **settings: algorithm, options, state and wire: see `CallSettings`.

    Returns:
        The total and what was dropped here.

    Raises:
        TypeError: An argument is of a wrong type, by itself: before anything is sent.
        ValueError: An argument does not fit, likewise.
        CollectiveError: The same on every rank: ranks disagree, or one of them fails.
    """
    comm = as_communicator(comm, patience=timeout)
    schedule, facts = prepare(sparse, comm, k, **settings)
    return run(schedule, comm, facts=facts, timeout=timeout, device=sparse.device)


def sparse_allreduce_async(
    sparse: SparseVector, comm: Any, *, k: int, timeout: float | None = None, **settings: Unpack[CallSettings]
) -> Work[Reduction]:
    """Like `sparse_allreduce`, in the background: `wait()` gives what that returns.

    All ranks start their calls in the same order; several may be in flight, and complete in any order. The input is
    copied, so it may be changed, or sent again, at once.

    Args:
        sparse: As in `sparse_allreduce`; so are the others.
        comm: The ranks.
        k: The most entries that a rank may contribute.
        timeout: Seconds to wait for late ranks.
        **settings: algorithm, options, state and wire: see `CallSettings`.

    Raises:
        TypeError: As `sparse_allreduce`.
        ValueError: As `sparse_allreduce`. What happens later is raised by `wait()`.
    """
    comm = as_communicator(comm, patience=timeout)
    schedule, facts = prepare(sparse, comm, k, **settings)
    return start(schedule, comm, facts=facts, timeout=timeout, device=sparse.device)


def prepare(
    sparse: SparseVector, comm: Communicator, k: int | None, **settings: Unpack[CallSettings]
) -> tuple[Schedule[Reduction], str]:
    """The schedule for a vector of any number of entries, and the facts that ranks must share."""
    if not isinstance(sparse, SparseVector):
        raise TypeError(
            f"sparse is {type(sparse).__name__}, expected a SparseVector, as topk(tensor, k) makes it; dense NumPy "
            "arrays and tensors of floats are summed by sparse_allreduce_array"
        )
    entry, state, k = resolved(sparse, comm, k, **settings)
    # Every call stamps its own number into the payload it sends: calls must not share one, nor the caller's.
    schedule = serving(state, entry.call(sparse.clone(), comm, k, state))
    return schedule, entry.facts(f"numel={sparse.numel}", f"{sparse.dtype}", f"k={k}", state=state)


def resolved(
    like: SparseVector,
    comm: Communicator,
    k: int | None,
    *,
    algorithm: str | Algorithm = "gtopk",
    options: Mapping[str, Any] | None = None,
    state: State | None = None,
    wire: str = "fp32",
) -> tuple[Algorithm, State | None, int]:
    """The algorithm of one call with its options and wire, its state, where it keeps one, and the checked k.

    like: a vector of the numel, dtype and device in question. Raises TypeError and ValueError for what is wrong.
    """
    if not like.numel:
        raise ValueError("sparse has numel=0, so there is nothing to sum: leave the call out on every rank")
    k = arguments.integer(k, "k", least=1, expected="the most entries that a rank may contribute")
    if state is not None and not isinstance(state, dict):
        raise TypeError(
            f"state is {type(state).__name__}, expected a dict that all such calls share: at first what the "
            "initial_state() of their Algorithm gives, {} for 'auto'"
        )
    if isinstance(algorithm, str) and algorithm == AUTO:
        algorithm, options, state, wire = remembered(state, like, comm, k, wire, options)
    entry = resolve(algorithm, options, size=comm.size, wire=wire, dtype=like.dtype)
    initial = entry.initial_state()
    if state is None:
        return entry, initial, k
    if initial is None:
        raise ValueError(f"{entry.name} keeps no state between calls: leave state out")
    entry.check_state(state)
    return entry, state, k


def serving(state: State | None, schedule: Schedule[Reduction]) -> Schedule[Reduction]:
    """Schedule as the one call that its state serves at a time. Raises ValueError where it serves another already."""
    if state is not None:
        before = _UNDER_WAY.get(id(state))
        if getattr(before, "gi_frame", None) is not None:
            raise ValueError(
                "this state serves a call that is under way, and one call at a time: wait() for that before the next, "
                "or give each of the calls that are under way together, and each rank, a state of its own"
            )
        _UNDER_WAY[id(state)] = schedule
    return schedule
