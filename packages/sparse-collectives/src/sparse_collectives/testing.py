"""The laws of a sparse allreduce, for tests of one's own. Needs hypothesis, as `communicators.testing` does.

    def test_laws():
        check_sparse_laws(MINE)

asserts them on inputs made to break them; `check_sparse_call` on inputs of your choice, and on real ranks.
"""

import copy
import operator
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from communicators import Communicator, Round, Schedule, SimulatedWorld, run, testing
from sparse_compress import SparseVector, topk
from sparse_compress.testing import reloaded
from torch import Tensor

from sparse_collectives.algorithm import Algorithm, Reduction, State, Traffic
from sparse_collectives.algorithms.table import resolve
from sparse_collectives.allreduce import sparse_allreduce
from sparse_collectives.wire import WIRES

SIZES = (1, 2, 3, 5, 8)
"""Numbers of ranks: powers of two, and not."""
SHAPES = ((1, 1), (2, 1), (33, 1), (33, 5), (33, 33), (60, 70))
"""(n, k): fewer elements than ranks, one entry, all of them, and more than there are."""
CODED_SHAPES = ((2, 1), (33, 5))
"""Sizes tried on wires of fewer bytes."""
CALLS = 3


def check_sparse_laws(
    algorithm: str | Algorithm,
    *,
    options: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = SIZES,
    max_examples: int | None = 40,
) -> None:
    """Asserts the laws of a sparse allreduce, in simulated worlds, on every wire that it takes, in both precisions.

    They are the laws of `check_sparse_call`, of several calls in a row where it keeps a state; that with k ≥ n the
    total is the whole sum; that ranks agree on any floats, and a total shows what is not finite; that wires of fewer
    bytes send fewer; that a checkpoint can hold the state; rounds; its `reference`, if any.

    Args:
        algorithm: An `Algorithm` of one's own, or a name.
        options: Its own settings.
        sizes: Of the worlds, in ranks.
        max_examples: Of all combinations of size, wire and shape (100 where every wire is taken) so many, the same each
            time, every size, wire and shape among them; None: all.

    Raises:
        AssertionError: A law does not hold; says which, where.
        ValueError: There is nothing to check, or no such algorithm.
    """
    if not isinstance(sizes, Collection) or not sizes or (max_examples is not None and max_examples < 1):
        given = f"sizes={sizes!r}, max_examples={max_examples}"
        raise ValueError(f"{given} check nothing: expected numbers of ranks, as (1, 2, 3), and at least one example")
    entries = {size: resolve(algorithm, options, size=size) for size in sizes}
    for size, entry in entries.items():
        _check_rounds(entry, size)
        _check_reference(entry, size)
        _check_bytes(entry, size)
    for size, wire, numel, k in _examples(entries, max_examples):
        _check_calls(entries[size], size, numel, k, wire)
        _check_floats(entries[size], size, numel, k, wire)


def check_sparse_call(
    algorithm: str | Algorithm,
    vectors: Sequence[SparseVector],
    *,
    k: int,
    options: Mapping[str, Any] | None = None,
    wire: str = "fp32",
    states: Sequence[State] | None = None,
    comm: Communicator | None = None,
) -> list[Reduction]:
    """Asserts conservation, agreement, that worlds agree, and that bytes and messages are what `sent` says.

    Args:
        algorithm: An `Algorithm` of one's own, or a name.
        vectors: Of every rank, of any number of entries, with values whose sums are exact (integers).
        k: The most entries that a rank may contribute.
        options: The algorithm's own settings.
        wire: A name in `WIRES`.
        states: Of every rank, left as they are; `sent` is of calls without.
        comm: Of real ranks, see `communicators.testing.check_laws`.

    Returns:
        The results in rank order.

    Raises:
        AssertionError: A law does not hold.
    """
    size, numel, dtype = len(vectors), vectors[0].numel, vectors[0].dtype
    entry = resolve(algorithm, options, size=size, wire=wire, dtype=dtype)

    def collective(comm: Communicator, sparse: SparseVector) -> Reduction:
        before = comm.bytes_sent, comm.messages_sent
        state = None if states is None else copy.deepcopy(states[comm.rank])
        result = sparse_allreduce(sparse, comm, k=k, algorithm=algorithm, options=options, wire=wire, state=state)
        if states is None:
            counted = comm.bytes_sent - before[0], comm.messages_sent - before[1]
            said = entry.sent(comm.rank, size, k, numel, dtype)[:2]
            right = counted == said if entry.exact else all(map(operator.le, counted, said))
            least = "" if entry.exact else "at most "
            assert right, f"bytes and messages: rank {comm.rank} sends {counted}, but {least}{said} as it says"
        return result

    with _naming(entry, size, numel, k, f"wire={wire}", dtype):
        return testing.check_laws(
            collective,
            vectors,
            dense=SparseVector.to_dense,
            total=lambda reduction: reduction.total.to_dense(),
            dropped=lambda reduction: reduction.dropped.to_dense(),
            comm=comm,
        )


@contextmanager
def _naming(entry: Algorithm, *example: object) -> Iterator[None]:
    """Adds to what an assertion says the example in which it does not hold: ranks, n, k, and what else."""
    try:
        yield
    except AssertionError as error:
        size, numel, k, *more = example
        where = ", ".join([f"{size} ranks", f"n={numel}", f"k={k}", *map(str, more)])
        raise AssertionError(f"{entry.name}, {where}: {error}") from error


def _examples(entries: Mapping[int, Algorithm], most: int | None) -> list[tuple[int, str, int, int]]:
    """(size, wire, n, k), at most so many: those first that bring a size, a wire or a shape which none has before."""
    every = [
        (size, wire, numel, k)
        for size, entry in entries.items()
        for wire in (WIRES if entry.takes_wire else ("fp32",))
        for numel, k in (SHAPES if wire == "fp32" else CODED_SHAPES)
    ]
    random.Random(0).shuffle(every)
    first = {part: case for case in every[::-1] for part in (case[0], case[1], case[2:])}
    new = list(dict.fromkeys(first.values()))
    rest = [case for case in every if case not in new]
    return every if most is None else [*new, *rest[: max(0, most - len(new))]]


def _check_calls(entry: Algorithm, size: int, numel: int, k: int, wire: str) -> None:
    """Checks calls on unequal numbers of entries, then successive calls with the algorithm's own selection, if any."""
    generator = torch.Generator().manual_seed(size)
    for dtype in (torch.float32, torch.float64) if wire == "fp32" else (torch.float32,):
        dense = _integers(size, numel, generator, dtype)
        unequal = [topk(x, (k + rank) % (numel + 1)) for rank, x in enumerate(dense)]
        check_sparse_call(entry, unequal, k=k, wire=wire)
        total = check_sparse_call(entry, [topk(x, k) for x in dense], k=k, wire=wire)[0].total.to_dense()
        if k >= numel and wire == "fp32":
            with _naming(entry, size, numel, k, f"wire={wire}", dtype):
                differs = testing.first_difference(total + 0.0, torch.stack(dense).sum(0) + 0.0)
                assert not differs, f"density 1: the total is not the whole sum: {differs}"
    states = [entry.initial_state() for _ in range(size)]
    kept = [state for state in states if state is not None] or None
    for _ in range(CALLS if kept or entry.prescribes else 0):
        dense = _integers(size, numel, generator)
        vectors = [_selected(entry, x, rank, size, k, states[rank]) for rank, x in enumerate(dense)]
        nothing = k and not any(map(len, vectors)) and any(bool(x.any()) for x in dense)
        assert not nothing, f"select returned no entry on any of {size} ranks, of {numel} elements and k={k}"
        check_sparse_call(entry, vectors, k=k, wire=wire, states=kept)
        _call(entry, vectors, k, wire, states)
    for state in kept or ():
        reloaded(state, entry.name)


def _call(
    entry: Algorithm, vectors: Sequence[SparseVector], k: int, wire: str, states: Sequence[State | None] | None = None
) -> list[Reduction]:
    """One call of all ranks, whose messages come in any order; it advances the states."""

    def call(comm: Communicator) -> Reduction:
        state = None if states is None else states[comm.rank]
        return sparse_allreduce(vectors[comm.rank], comm, k=k, algorithm=entry, wire=wire, state=state)

    return SimulatedWorld(len(vectors), seed=1, jitter=1e-3).run(call)


def _selected(entry: Algorithm, x: Tensor, rank: int, size: int, k: int, state: State | None) -> SparseVector:
    if not entry.prescribes:
        return topk(x, k)
    before = repr(state)
    vector = entry.select(x, rank, size, k, state)(x)
    most = k if entry.cuts else len(x)
    fits = isinstance(vector, SparseVector) and len(vector) <= most
    assert fits, f"select returned {vector}, expected a SparseVector of k={most} entries at most"
    assert repr(state) == before, f"select changed the state from {before} to {state}: only a call may"  # noqa: S608 - no SQL
    at = vector.indices.long()
    assert torch.equal(vector.values, x[at]), f"select gave other values than those at its indices {at.tolist()}"
    return vector


def _check_floats(entry: Algorithm, size: int, numel: int, k: int, wire: str) -> None:
    """NaN, whose payloads do not commute, infinities, denormals, ties and both zeros."""
    strange = torch.tensor([0.0, -0.0, 1e-40, 1.0, -1.0, 1.0, 0.1, 3e38, float("inf"), -float("inf")])
    for seed, bad in enumerate((None, 8, "nan")):
        generator = torch.Generator().manual_seed(seed)
        dense = [strange[torch.randint(8, (numel,), generator=generator)] for _ in range(size)]
        for rank in range(size) if bad == "nan" else range(size - 1, size) if bad else ():
            payload = torch.tensor([0x7FC00001 + rank], dtype=torch.int32).view(torch.float32)
            dense[rank][numel // 2] = payload if bad == "nan" else strange[8]
        totals = [result.total for result in _call(entry, [topk(x, k) for x in dense], k, wire)]
        with _naming(entry, size, numel, k, f"wire={wire}", ("any floats", "an inf", "NaN")[seed]):
            for rank, total in enumerate(totals):
                differs = testing.first_difference(total.to_dense(), totals[0].to_dense())
                same = torch.equal(total.pack()[16:], totals[0].pack()[16:])
                assert same, f"agreement: rank {rank} against rank 0: {differs or 'explicit zeros elsewhere'}"
            seen = not bool(totals[0].values.isfinite().all())
            assert seen or bad is None, f"element {numel // 2} of an input was not finite, but the total is"


def _check_rounds(entry: Algorithm, size: int) -> None:
    numel, k = 50, 4

    def call(comm: Communicator) -> int:
        schedule = entry.call(topk(torch.ones(numel), k), comm, k, entry.initial_state())
        return run(_counted(schedule), comm, facts=entry.name)

    for rank, rounds in enumerate(SimulatedWorld(size).run(call)):
        with _naming(entry, size, numel, k):
            said = entry.sent(rank, size, k, numel, torch.float32)
            assert isinstance(said, Traffic), f"sent returned {said!r}, expected a Traffic(nbytes, messages, rounds)"
            right = rounds == said.rounds if entry.exact else rounds <= said.rounds
            assert right, f"rounds: rank {rank} took part in {rounds}, but sent says {said.rounds}"


def _check_bytes(entry: Algorithm, size: int) -> None:
    """Checks that all ranks together send fewer bytes on every wire of fewer bytes."""
    numel, k, sent = 10_000, 500, dict[str, int]()
    for wire in WIRES if entry.takes_wire and size > 1 else ():
        coded = resolve(entry, size=size, wire=wire)
        sent[wire] = sum(coded.sent(rank, size, k, numel, torch.float32).nbytes for rank in range(size))
        with _naming(entry, size, numel, k):
            fewer = wire == "fp32" or sent[wire] < sent["fp32"]
            assert fewer, (
                f"wires: {sent[wire]} bytes on {wire}, {sent['fp32']} on fp32: schedule and sent must use self.wire"
            )


def _counted(schedule: Schedule[Reduction]) -> Schedule[int]:
    """The schedule, which returns the number of its rounds."""
    rounds = 0
    received: Any = None
    with suppress(StopIteration):
        while True:
            action = schedule.send(received)
            rounds += isinstance(action, Round)
            received = yield action
    return rounds


def _check_reference(entry: Algorithm, size: int) -> None:
    if type(entry).reference is Algorithm.reference:
        return
    numel, k, generator = 33, 5, torch.Generator().manual_seed(size)
    dense = _integers(size, numel, generator)
    expected = torch.as_tensor(entry.reference([x.numpy() for x in dense], k))
    given = [topk(x, k if entry.cuts else numel) for x in dense]
    for rank, result in enumerate(_call(entry, given, k, "fp32")):
        with _naming(entry, size, numel, k):
            differs = testing.first_difference(result.total.to_dense() + 0.0, expected + 0.0)
            assert not differs, f"reference: rank {rank}: {differs}"


def _integers(size: int, numel: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random integers up to 10,000, so that most wires must round them, or up to 4, so that there are ties.

    In float64 all are multiples of 2³⁰ + 1, which float32 does not hold.
    """
    most, unit = 10_000 if numel % 2 else 4, (1 << 30) + 1 if dtype == torch.float64 else 1
    return [unit * torch.randint(-most, most, (numel,), generator=generator).to(dtype) for _ in range(size)]
